"""Print how many bad files of each kind were tried, and what the readers made of them."""

import csv
import sys
from collections import Counter, defaultdict

found: dict[str, Counter[str]] = defaultdict(Counter)
with open(sys.argv[1]) as file:
    for kind, outcome in csv.reader(file):
        found[kind][outcome] += 1
print("| kind | tried | still readable | ValueError | FileNotFoundError | other OSError |")
print("| --- | --- | --- | --- | --- | --- |")
total: Counter[str] = Counter()
for kind, outcomes in [*found.items(), ("all", total)]:
    names = ("read", "ValueError", "FileNotFoundError")
    other = outcomes.total() - sum(outcomes[name] for name in names)
    print(f"| {kind} | {outcomes.total()} | {' | '.join(str(outcomes[name]) for name in names)} | {other} |")
    if kind != "all":
        total.update(outcomes)
