"""A run directory as `status`, `report`, `view` and `export` see it: read only, also while the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from gristmill import events
from gristmill.errors import SetupError
from gristmill.quality.base import ActiveFilter
from gristmill.run.adopt import tools_of_rows
from gristmill.run.index import Damage, Index, Indexed
from gristmill.run.layout import Layout
from gristmill.run.manifest import DatasetFacts, Manifest, read_manifest
from gristmill.run.merge import MergeReport, merge, run_facts
from gristmill.stats import Fold, RowSummary
from gristmill.trajectory import decode_row

_BLOCK = 1 << 20


class RunReader:
    """Reads one run. Close it, or use it in a `with` block."""

    def __init__(self, root: str | Path, known_tools: Sequence[str] = ()) -> None:
        """Open a run directory.

        Args:
            root: the directory.
            known_tools: the columns of a run that has no manifest because the reference made it.

        Raises:
            SetupError: it is no run directory.
            StoreError: its files cannot be read.
        """
        self.layout = Layout(Path(root))
        if not self.layout.manifest.exists() and not self.layout.batches():
            raise SetupError(
                f"{root} is no run directory: it holds neither run.json nor batch files.",
                "Give a directory like data/<run_name>.",
            )
        self.manifest = read_manifest(self.layout) or _manifest_of_reference(self.layout, known_tools)
        self._index = Index(self.layout)
        self._index.rename(self.manifest.renamed)

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._index.close()

    def refresh(self) -> None:
        """Take in what was written since the opening."""
        self._index.refresh()

    def lines(self) -> Iterator[Indexed]:
        """All lines with their summaries, by batch number and file order; those that a later one replaces too."""
        return self._index.lines()

    def summaries(self) -> Iterator[RowSummary]:
        """The summary of the line that counts of each task and sample."""
        return (line.summary for line in self._index.lines() if line.counts)

    def read(self, line: Indexed) -> dict[str, Any]:
        """The decoded line. Raises `OSError` or `ValueError` where the file was changed."""
        with self.layout.batch(line.batch).open("rb") as file:
            return decode_row(os.pread(file.fileno(), line.length, line.offset))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The merged rows; nothing before the first merge."""
        if not self.layout.trajectories.exists():
            return
        with self.layout.trajectories.open("rb") as file:
            for line in file:
                yield decode_row(line)

    def damage(self) -> list[Damage]:
        """Lines that are no outcome."""
        return self._index.damage()

    def statistics(self) -> dict[str, Any]:
        """`statistics.json` as it would be now, before merge filters; nothing is written."""
        total = Fold()
        for line in self._index.lines():
            if line.counts:
                total.add(line.summary)
            else:
                total.add_repeated(line.summary)
        facts = run_facts(
            self.layout,
            self.manifest,
            known_tools=tuple(self.manifest.known_tools),
            unreadable_lines=len(self.damage()),
        )
        return total.result(facts)

    def merged_statistics(self) -> dict[str, Any] | None:
        """`statistics.json` of the last merge, None where there is none that can be read."""
        try:
            found = orjson.loads(self.layout.statistics.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return found if isinstance(found, dict) else None

    def read_record(self, batch: int, prompt_index: int, sample: int = 0, attempt: int = 0) -> dict[str, Any] | None:
        """The session record of a prompt; the last attempt where none is named, None where there is none."""
        found = None
        for record in self.records(batch):
            if (record.get("prompt_index"), record.get("sample")) == (prompt_index, sample) and (
                not attempt or record.get("attempt") == attempt
            ):
                found = record
        return found

    def records(self, batch: int) -> Iterator[dict[str, Any]]:
        """All session records of a batch in file order; a torn one at the end is passed over."""
        path = self.layout.sessions(batch)
        if path.exists():
            with path.open("rb") as file:
                yield from _records(file)

    def merge(
        self, filters: Sequence[ActiveFilter] = (), listen: Callable[[events.Event], None] | None = None
    ) -> MergeReport:
        """Merge again, with these filters. Raises `StoreError`."""
        return merge(self.layout, self._index, self.manifest, filters, listen)


def _records(file: BinaryIO) -> Iterator[dict[str, Any]]:
    data = b""
    while True:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts = []
        while not frame.eof:
            data = data or file.read(_BLOCK)
            if not data:
                return
            try:
                parts.append(frame.decompress(data))
            except zstandard.ZstdError:
                return
            data = frame.unused_data
        yield orjson.loads(b"".join(parts))


def _manifest_of_reference(layout: Layout, known_tools: Sequence[str]) -> Manifest:
    """What can be said of a run that the reference made: its statistics.json tells the most."""
    told: dict[str, Any] = {}
    if layout.statistics.exists():
        try:
            told = orjson.loads(layout.statistics.read_bytes())
        except orjson.JSONDecodeError:
            told = {}
    tools = tools_of_rows(layout)
    return Manifest(
        run_name=layout.run_name,
        run_id=layout.run_name,
        created="",
        made_by="reference",
        seed=0,
        model=str(told.get("model", "")),
        distribution=str(told.get("distribution", "")),
        known_tools=list(known_tools or tools),
        adopted_tools=[name for name in tools if known_tools and name not in known_tools],
        settings={"batch_size": told.get("batch_size", 0)},
        dataset=DatasetFacts(prompts=int(told.get("total_prompts", 0))),
        versions={},
    )
