"""The filter port: a filter looks at one row and says why it should not be kept, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from gristmill.row_summary import RowSummary


@dataclass(frozen=True)
class FilterContext:
    """What a filter may know besides the row: the names of the tools that the run knows, and its numeric argument.

    `seen` is the filter's own memory over the rows of one merge, empty at its beginning.
    """

    known_tools: frozenset[str] = frozenset()
    argument: float | None = None
    seen: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Filter:
    """A named rule.

    `when` is `session` for a rule that discards a session as it ends (a tombstone is left in its place), and `merge`
    for one that leaves a row out of the merged file.
    `judge(row, context)` gets a decoded row (SPEC names: `conversations`, `tool_stats`, …) and returns the reason to
    drop it, or an empty text to keep it. It must not change the row.
    `suspects(summary, context)` may spare a merge the reading of most rows: False says that `judge` would keep the row
    of this summary. None: every row is judged.
    `argument` names the number that the filter takes (`--filters name=5`), empty where it takes none.
    `drops` is what the console calls a row that the filter leaves out.
    """

    name: str
    when: Literal["session", "merge"]
    judge: Callable[[dict[str, Any], FilterContext], str]
    description: str = ""
    suspects: Callable[[RowSummary, FilterContext], bool] | None = None
    argument: str = ""
    drops: str = "entry"


@dataclass(frozen=True)
class ActiveFilter:
    """A filter with the argument that the user gave it."""

    filter: Filter
    argument: float | None = None

    @property
    def name(self) -> str:
        """The filter's name."""
        return self.filter.name

    def context(self, known_tools: frozenset[str]) -> FilterContext:
        """A fresh context, for one session or one merge."""
        return FilterContext(known_tools=known_tools, argument=self.argument)

    def message(self, batch: int, reason: str) -> str:
        """What is printed where a merge leaves a row out."""
        return f"⚠️  Filtering {self.filter.drops} (batch {batch}): {reason}"
