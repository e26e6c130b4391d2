"""The filter port: a filter looks at one row and says why it should not be kept, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class FilterContext:
    """What a filter may know besides the row: the names of the tools that the run knows, and its numeric argument."""

    known_tools: frozenset[str] = frozenset()
    argument: float | None = None


@dataclass(frozen=True)
class Filter:
    """A named rule.

    `when` is `session` for a rule that discards a session as it ends (a tombstone is left in its place), and `merge`
    for one that leaves a row out of the merged file.
    `judge(row, context)` gets a decoded row (SPEC names: `conversations`, `tool_stats`, …) and returns the reason to
    drop it, or an empty text to keep it. It must not change the row.
    """

    name: str
    when: Literal["session", "merge"]
    judge: Callable[[dict[str, Any], FilterContext], str]
    description: str = ""
