"""Print how many bad files of each kind were tried, and how the readers ended: a part of docs/results/soak.md."""

import csv
import sys
from collections import Counter, defaultdict

found: dict[str, Counter[str]] = defaultdict(Counter)
with open(sys.argv[1]) as file:
    for kind, outcome in csv.reader(file):
        found[kind][outcome] += 1
print("""
## Damaged and hostile files

Whole files are damaged: bytes are cut off, flipped, put in, taken out or repeated, or numbers are made as large as they
can be. There are 400 files of each kind, and files of noise. The files meant to harm are headers of terabytes, archives
that unpack to huge sizes, links and names that lead out of the folder, programs in pickles, PostScript, and labels of
10¹². Each file is read, or refused with an error that begins with `recipes.`. The test fails on any other exception, if
a program is started, if a file outside of the folder is opened, and after 30 s.

| kind | tried | still readable | ValueError | FileNotFoundError | other OSError |
| --- | ---: | ---: | ---: | ---: | ---: |""")
total: Counter[str] = Counter()
for kind, outcomes in [*found.items(), ("all", total)]:
    names = ("read", "ValueError", "FileNotFoundError")
    other = outcomes.total() - sum(outcomes[name] for name in names)
    print(f"| {kind} | {outcomes.total()} | {' | '.join(str(outcomes[name]) for name in names)} | {other} |")
    if kind != "all":
        total.update(outcomes)
