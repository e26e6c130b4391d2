"""The merge: batch files → `trajectories.jsonl` and `statistics.json`, at any time and as often as one likes.

It takes the batch files in number order and their lines in file order, leaves out what is no trajectory, what a later
line of the same task and sample replaces and what a filter drops, and gives every row one schema. It reads only what it
copies, and holds one row in memory at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from gristmill import events
from gristmill.errors import StoreError
from gristmill.quality.base import ActiveFilter, FilterContext
from gristmill.row_summary import RowSummary, summarize
from gristmill.run.adopt import complete_row
from gristmill.run.atomic import replacing, write_atomic
from gristmill.run.index import Damage, Index, Indexed
from gristmill.run.layout import Layout
from gristmill.run.manifest import Manifest
from gristmill.stats import Facts, Fold
from gristmill.trajectory import conform, decode_row, encode_row, timestamp

# What loaders take for a time instead of text, if all values of the first 10 MB look like it.
_TIME = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d(:?\d\d(:?\d\d)?)?(Z|[+-]\d\d:?(\d\d)?)?)?")

# Columns of which some values tell a loader no type, or a wrong one, and the rows that show it.
_SHOWN: dict[str, Callable[[RowSummary], bool]] = {
    "tool_calls": lambda summary: summary.calls > 0,
    "toolsets_used": lambda summary: bool(summary.toolsets_used),
    "row_id": lambda summary: not _TIME.fullmatch(summary.row_id),
}


class MergeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a merge did, in lines. `rows` went into the file, from `files` batch files.

    `replaced` are rows that a later one of the same task and sample replaces; `written` names the files of the run that
    there are now; `statistics` is statistics.json; `seconds` is the merge's own time.
    """

    rows: int
    files: int
    discarded: int
    failed: int
    replaced: int
    filtered: dict[str, int]
    unreadable: list[Damage]
    statistics: dict[str, Any]
    written: tuple[str, ...]
    seconds: float


def merge(
    layout: Layout,
    index: Index,
    manifest: Manifest,
    filters: Sequence[ActiveFilter] = (),
    listen: Callable[[events.Event], None] | None = None,
) -> MergeReport:
    """Write `trajectories.jsonl` and `statistics.json` anew, each at once or not at all.

    Raises:
        StoreError: the disk does not take them, or batch files cannot be read; the old files stay.
    """
    begun = time.monotonic()
    tell = listen or (lambda event: None)
    files = len(layout.batches())
    tell(events.Merging(files=files))
    work = _Merge(layout, index, manifest, filters)
    try:
        with replacing(layout.trajectories) as out:
            work.write(out, tell)
    finally:
        work.close()
    damage = index.damage()
    statistics = work.total.result(
        run_facts(layout, manifest, known_tools=work.tools, unreadable_lines=len(damage), completed_at=timestamp())
    )
    write_atomic(layout.statistics, msgspec.json.format(msgspec.json.encode(statistics), indent=2) + b"\n")
    counts = statistics["reconcile"]
    return MergeReport(
        rows=counts["kept"],
        files=files,
        discarded=counts["discarded"],
        failed=counts["failed"],
        replaced=work.replaced,
        filtered=statistics["filtered"],
        unreadable=damage,
        statistics=statistics,
        written=layout.written(),
        seconds=time.monotonic() - begun,
    )


def run_facts(layout: Layout, manifest: Manifest, **more: Any) -> Facts:
    """What statistics say of a run besides its lines."""
    return Facts(
        run_name=manifest.run_name,
        distribution=manifest.distribution,
        model=manifest.model,
        batch_size=manifest.settings.get("batch_size", 0),
        batches=len(layout.batches()),
        prompts=manifest.dataset.prompts,
        refused=manifest.dataset.refused,
        samples=manifest.dataset.samples,
        beyond=manifest.dataset.beyond,
        seed=manifest.seed,
        duration_seconds=manifest.duration_seconds,
        **more,
    )


class _Merge:
    """One merge under way."""

    def __init__(self, layout: Layout, index: Index, manifest: Manifest, filters: Sequence[ActiveFilter]) -> None:
        self._index = index
        self._filters = filters
        self._known = frozenset((*manifest.known_tools, *manifest.adopted_tools))
        self.tools = (*manifest.known_tools, *self._called(set(manifest.adopted_tools)))
        self._columns = index.columns_id(self.tools)
        self._lines = _Lines(layout)
        self.total = Fold()
        self.replaced = 0
        self.close = self._lines.close

    def _called(self, adopted: set[str]) -> list[str]:
        """Tools of the reference that its rows did call; the many others get no column."""
        called: set[str] = set()
        if adopted:
            for line in self._index.lines():
                called |= adopted.intersection(line.summary.tools)
        return sorted(called)

    def write(self, out: BinaryIO, tell: Callable[[events.Event], None]) -> None:
        leads = self._leads()
        for line in leads:
            out.write(self._row(line)[0])
        first = {(line.batch, line.offset) for line in leads}
        judges = self._judges()
        for line in self._index.lines():
            if not line.counts:
                self.total.add_repeated(line.summary)
                self.replaced += line.summary.state == "kept"
                continue
            name, reason = self._judge(line, judges)
            if name or line.summary.state != "kept":
                self.total.add(line.summary, filtered=name)
                if name:
                    tell(events.Filtered(batch=line.batch, filter=name, reason=reason))
                continue
            row, summary = self._row(line)
            self.total.add(summary)
            if (line.batch, line.offset) not in first:
                out.write(row)

    def _leads(self) -> list[Indexed]:
        """The rows that come first, so that a loader sees in them what type each column has: one with a tool call, and
        at most two more for what that one does not show.
        """
        found: dict[str, Indexed] = {}
        judges = self._judges()
        for line in self._index.lines():
            if len(found) == len(_SHOWN):
                break
            if line.counts and line.summary.state == "kept" and not self._judge(line, judges)[0]:
                for sign, shows in _SHOWN.items():
                    if sign not in found and shows(line.summary) and self._shows_calls(sign, line):
                        found[sign] = line
        leads: list[Indexed] = []
        for sign, shows in _SHOWN.items():
            if sign in found and not any(shows(lead.summary) for lead in leads):
                leads.append(found[sign])
        return leads

    def _shows_calls(self, sign: str, line: Indexed) -> bool:
        # A row of the reference counts calls that cannot always be read from its text. Looked for in the bytes: inside
        # a text the quotes would be escaped.
        return sign != "tool_calls" or b'"tool_calls":[{' in self._row(line)[0]

    def _judges(self) -> list[tuple[ActiveFilter, FilterContext]]:
        return [(active, active.context(self._known)) for active in self._filters]

    def _judge(self, line: Indexed, judges: list[tuple[ActiveFilter, FilterContext]]) -> tuple[str, str]:
        """The name and reason of the first filter that drops a row, empty where it is kept."""
        if line.summary.state != "kept":
            return "", ""
        row: dict[str, Any] | None = None
        for active, context in judges:
            suspects = active.filter.suspects
            if suspects is not None and not suspects(line.summary, context):
                continue
            if row is None:
                row = decode_row(self._lines.read(line))
                if not line.columns:
                    row = complete_row(row, line.summary)
            if reason := active.filter.judge(row, context):
                return active.name, reason
        return "", ""

    def _row(self, line: Indexed) -> tuple[bytes, RowSummary]:
        """The line as it goes into the merged file, and its summary: unchanged where it has the run's schema."""
        data = self._lines.read(line)
        if line.columns == self._columns:
            return data, line.summary
        row = encode_row(conform(complete_row(decode_row(data), line.summary), self.tools))
        # A row of another version keeps what it does not say: its usage is not a usage of zero.
        return row, msgspec.structs.replace(summarize(row), usage=line.summary.usage)


class _Lines:
    """Reads indexed lines; one batch file is open at a time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._batch = -1
        self._file: BinaryIO | None = None

    def read(self, line: Indexed) -> bytes:
        path = self._layout.batch(line.batch)
        try:
            if self._file is None or self._batch != line.batch:
                self.close()
                self._file, self._batch = path.open("rb"), line.batch
            self._file.seek(line.offset)
            data = self._file.read(line.length)
        except OSError as error:
            raise StoreError(f"Cannot read {path}: {error.strerror}.", "Mend the disk, then merge again.") from error
        if len(data) != line.length or not data.endswith(b"\n"):
            raise StoreError(f"{path} was changed while it was merged.", "Merge again.")
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
