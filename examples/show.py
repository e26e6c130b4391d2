"""Print one row of a merged file for people: `python examples/show.py data/demo/trajectories.jsonl [N]`."""

import json
import sys
from itertools import islice
from pathlib import Path

path = Path(sys.argv[1])
number = int(sys.argv[2]) if len(sys.argv) > 2 else 0
with path.open(encoding="utf-8") as file:
    row = json.loads(next(islice(file, number, None)))
print(f"{path}, row {number}: {row['outcome']} after {row['api_calls']} turns, reward {row['reward']}")
for turn in row["conversations"]:
    if turn["from"] != "system":
        print(f"\n[{turn['from']}]\n{turn['value']}")
