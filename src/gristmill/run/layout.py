"""The run directory. This is the only place that spells its file names.

```
<output_dir>/<run_name>/
├── run.json                  the manifest: settings without secrets, versions, dataset, seed, invocations
├── batch_<N>.jsonl           one line per outcome; the truth
├── batch_<N>.jsonl.torn-<T>  what was cut off the end of that file after a crash
├── sessions_<N>.jsonl.zst    the lossless record of each session, one zstd frame per session
├── index.sqlite              a cache over the batch files
├── checkpoint.json           for users of the reference; a cache too
├── checkpoint.json.<why>-<T> a checkpoint that was damaged or another run's
├── trajectories.jsonl        the merged result
├── trajectories.jsonl.earlier-<T>  one whose batch files are gone
├── statistics.json           figures of the whole run
├── report.html               the same to look at
└── .lock                     held by the process that owns the directory; says its pid
```
N counts from 0, T is a time. A file that is being replaced is written as `.<name>.<pid>.tmp` first.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_BATCH = re.compile(r"batch_(0|[1-9][0-9]{0,6})\.jsonl")
_NUMBERED = re.compile(r"(?:batch|sessions)_(0|[1-9][0-9]{0,6})\.jsonl(?:\.zst)?")


@dataclass(frozen=True)
class Layout:
    """The paths of one run."""

    root: Path

    @classmethod
    def of(cls, output_dir: str | Path, run_name: str) -> Layout:
        """The directory of a run below an output directory."""
        return cls(Path(output_dir) / run_name)

    @property
    def run_name(self) -> str:
        """The directory's own name."""
        return self.root.absolute().name

    @property
    def manifest(self) -> Path:
        return self.root / "run.json"

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint.json"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories.jsonl"

    @property
    def statistics(self) -> Path:
        return self.root / "statistics.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def batch(self, number: int) -> Path:
        """Rows of a batch."""
        return self.root / f"batch_{number}.jsonl"

    def sessions(self, number: int) -> Path:
        """Session records of a batch."""
        return self.root / f"sessions_{number}.jsonl.zst"

    def batches(self) -> dict[int, os.stat_result]:
        """The batch files that there are, by number and in its order, with what the file system says of each."""
        found = {int(m[1]): entry.stat() for entry in self._entries() if (m := _BATCH.fullmatch(entry.name))}
        return dict(sorted(found.items()))

    def next_batch(self) -> int:
        """The number after the highest that any file carries."""
        return max((int(m[1]) for entry in self._entries() if (m := _NUMBERED.fullmatch(entry.name))), default=-1) + 1

    def holds_outcomes(self) -> bool:
        """True where a run has left rows here."""
        merged = self.trajectories.name
        return any(
            (entry.name == merged or _BATCH.fullmatch(entry.name)) and entry.stat().st_size > 0
            for entry in self._entries()
        )

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def written(self) -> tuple[str, ...]:
        """Names of what is there for a user to look at, in the order drawn above; many batch files as a pattern."""
        shown = [self.manifest, self.checkpoint, self.trajectories, self.statistics, self.report]
        names = [path.name for path in shown if path.exists()]
        if any(_BATCH.fullmatch(entry.name) for entry in self._entries()):
            names[1:1] = ["batch_*.jsonl", "sessions_*.jsonl.zst"]
        return tuple(names)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file so that it is kept under another name, `<name>.<why>-<time>`, and give that name."""
    kept = aside_name(path, why)
    path.rename(kept)
    return kept


def aside_name(path: Path, why: str) -> Path:
    """A free name beside a file for what is taken from it."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    kept = path.with_name(f"{path.name}.{why}-{stamp}")
    copy = 1
    while kept.exists():
        copy += 1
        kept = path.with_name(f"{path.name}.{why}-{stamp}-{copy}")
    return kept
