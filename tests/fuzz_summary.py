"""Print, for each engine, how many examples `make fuzz` tried and the largest relative error among them."""

import csv
import sys
from collections import defaultdict

errors: dict[str, list[float]] = defaultdict(list)
with open(sys.argv[1]) as file:
    for engine, error in csv.reader(file):
        errors[engine].append(float(error))
print(f"{'engine':<10} {'examples':>8} {'largest error':>14}")
for engine, found in sorted(errors.items()):
    print(f"{engine:<10} {len(found):>8} {max(found):>14.1e}")
