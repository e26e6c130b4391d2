"""`checkpoint.json`, for people and programs that know the reference's. It is only written: the batch files decide."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import orjson

from gristmill.run.layout import Layout, set_aside
from gristmill.trajectory import timestamp

_GROWTH = 1.1  # each checkpoint is that much longer than the one before, so all of them together cost linear time
_UNKNOWN = -1


class BatchCounts(msgspec.Struct):
    """Sessions of a batch that settled their prompt, and those of them without reasoning. Nothing is ever skipped."""

    processed: int = 0
    skipped: int = 0
    discarded_no_reasoning: int = 0


class Checkpoint:
    """What the checkpoint says, kept up to date. A prompt is completed when none of its samples is owed.

    Args:
        run_name: the run's.
        samples_left: how many samples each prompt index still owes.
        batches: number, settled lines and discards without reasoning of each batch so far.
    """

    def __init__(
        self, run_name: str, samples_left: Iterable[tuple[int, int]], batches: Iterable[tuple[int, int, int]]
    ) -> None:
        self._run_name = run_name
        self._left = array("i")
        for index, left in samples_left:
            if index >= len(self._left):
                self._left.extend([_UNKNOWN] * (index + 1 - len(self._left)))
            self._left[index] = left
        self._batches = {number: BatchCounts(settled, 0, discarded) for number, settled, discarded in batches}
        self._settled = sum(counts.processed for counts in self._batches.values())
        self._due_at = 0

    def note(self, prompt_index: int, batch: int, *, no_reasoning: bool) -> None:
        """Count a session that settled its prompt, now or once its other samples have."""
        if prompt_index < len(self._left) and self._left[prompt_index] > 0:
            self._left[prompt_index] -= 1
        counts = self._batches.setdefault(batch, BatchCounts())
        counts.processed += 1
        counts.discarded_no_reasoning += no_reasoning
        self._settled += 1

    @property
    def due(self) -> bool:
        """True where the file has fallen behind far enough to be written."""
        return self._settled >= self._due_at

    def encode(self) -> bytes:
        """The file's content now; it is due again after the next tenth."""
        self._due_at = max(self._settled + 1, int(self._settled * _GROWTH))
        return msgspec.json.encode(
            {
                "run_name": self._run_name,
                "completed_prompts": [index for index, left in enumerate(self._left) if left == 0],
                "batch_stats": {str(number): counts for number, counts in sorted(self._batches.items())},
                "last_updated": timestamp(),
            }
        )


def check_checkpoint(layout: Layout, run_name: str) -> str:
    """Put a checkpoint that is damaged or another run's under another name, and say so; empty where it is sound."""
    try:
        data = layout.checkpoint.read_bytes()
    except FileNotFoundError:
        return ""
    fault = _fault(data, run_name)
    if not fault:
        return ""
    kept = set_aside(layout.checkpoint, "foreign" if fault.startswith("of run") else "damaged")
    return f"checkpoint.json is {fault}; it was kept as {kept.name} and is made anew from the batch files."


def _fault(data: bytes, run_name: str) -> str:
    try:
        found: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        return "damaged" if data.strip() else "empty"
    if not isinstance(found, dict):
        return "damaged"
    name = found.get("run_name", run_name)
    if name != run_name:
        return f"of run {name!r}, not {run_name!r}"
    completed = found.get("completed_prompts", [])
    if not isinstance(completed, list) or not all(type(index) is int for index in completed):
        return "damaged"
    return "" if isinstance(found.get("batch_stats", {}), dict) else "damaged"
