"""The built-in filters, and how `--filters` names them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gristmill.errors import UsageError
from gristmill.quality.base import ActiveFilter, Filter, FilterContext
from gristmill.row_summary import RowSummary


def _no_reasoning(row: dict[str, Any], context: FilterContext) -> str:
    # Reasoning that a provider shows encrypted only is counted as reasoning where the row's counts are made.
    return "" if row["reasoning_stats"]["turns_with_reasoning"] else "no reasoning in any turn"


def _unknown_tool(row: dict[str, Any], context: FilterContext) -> str:
    called = {call["name"]: None for turn in row["conversations"] for call in turn.get("tool_calls") or ()}
    called |= {name: None for name, counts in row["tool_stats"].items() if counts["count"]}
    unknown = [name for name in called if name not in context.known_tools]
    return f"invalid tool {', '.join(repr(name) for name in unknown)}" if unknown else ""


def _may_call_unknown_tools(summary: RowSummary, context: FilterContext) -> bool:
    return bool(summary.unknown_calls) or any(name not in context.known_tools for name in summary.tools)


def _duplicates(row: dict[str, Any], context: FilterContext) -> str:
    turns = [(turn["from"], turn["value"]) for turn in row["conversations"] if turn["from"] != "system"]
    digest = hashlib.blake2b(msgspec.msgpack.encode(turns), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    if number in context.seen:
        return "the same conversation as an earlier row"
    context.seen.add(number)
    return ""


def _completed_only(row: dict[str, Any], context: FilterContext) -> str:
    return "" if row["completed"] else f"ended as {row['outcome']}"


def _min_tool_calls(row: dict[str, Any], context: FilterContext) -> str:
    calls = sum(len(turn["tool_calls"]) for turn in row["conversations"])
    least = _argument(context)
    return "" if calls >= least else f"{calls} tool calls, fewer than {least:g}"


def _min_reward(row: dict[str, Any], context: FilterContext) -> str:
    least = _argument(context)
    if not row["graded"]:
        return "not graded"
    return "" if row["reward"] >= least else f"reward {row['reward']:g}, less than {least:g}"


def _max_tokens(row: dict[str, Any], context: FilterContext) -> str:
    tokens = row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"]
    most = _argument(context)
    return "" if tokens <= most else f"{tokens} tokens, more than {most:g}"


def _argument(context: FilterContext) -> float:
    if context.argument is None:
        raise UsageError("A filter that needs a number was made without one.")
    return context.argument


FILTERS: Mapping[str, Filter] = {
    filter.name: filter
    for filter in (
        Filter("no_reasoning", "session", _no_reasoning, "discards a session without reasoning in any turn"),
        Filter(
            "unknown_tool",
            "merge",
            _unknown_tool,
            "leaves out rows with a call of a tool that the run does not know",
            suspects=_may_call_unknown_tools,
            drops="corrupted entry",
        ),
        Filter("duplicates", "merge", _duplicates, "leaves out rows with the conversation of an earlier row"),
        Filter(
            "completed_only",
            "merge",
            _completed_only,
            "leaves out rows without a final answer",
            suspects=lambda summary, context: summary.outcome != "completed",
        ),
        Filter(
            "min_tool_calls",
            "merge",
            _min_tool_calls,
            "leaves out rows with fewer tool calls",
            suspects=lambda summary, context: summary.calls < _argument(context),
            argument="calls",
        ),
        Filter(
            "min_reward",
            "merge",
            _min_reward,
            "leaves out rows with a lower reward, and rows that were not graded",
            suspects=lambda summary, context: not summary.graded or summary.reward < _argument(context),
            argument="reward",
        ),
        Filter(
            "max_tokens",
            "merge",
            _max_tokens,
            "leaves out rows whose session used more tokens, all its calls together",
            suspects=lambda summary, context: (
                summary.usage is not None and summary.usage.total_tokens > _argument(context)
            ),
            argument="tokens",
        ),
    )
}


def parse_filters(text: str | Iterable[str], known: Mapping[str, Filter] = FILTERS) -> tuple[ActiveFilter, ...]:
    """The filters that `--filters` names: `a,b=3`, or `none`.

    Args:
        text: the flag's value, or its parts.
        known: all filters by name.

    Raises:
        UsageError: an unknown name, a name given twice, or a number that is missing, too many or none.
    """
    parts = text.split(",") if isinstance(text, str) else list(text)
    parts = [part.strip() for part in parts]
    if parts in ([], ["none"]):
        return ()
    active: dict[str, ActiveFilter] = {}
    for part in parts:
        name, given, value = part.partition("=")
        found = known.get(name.strip())
        if found is None:
            raise UsageError(f"Unknown filter: {name!r}.", f"Known are {_listed(known)}; 'none' switches all off.")
        if found.name in active:
            raise UsageError(f"The filter {found.name} is given twice.")
        active[found.name] = ActiveFilter(found, _number(found, value.strip() if given else None))
    return tuple(active.values())


def _number(filter: Filter, value: str | None) -> float | None:
    if not filter.argument:
        if value is not None:
            raise UsageError(f"The filter {filter.name} takes no value, but {value!r} was given.")
        return None
    try:
        number = float(value) if value is not None else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(
            f"The filter {filter.name} needs a number, {'none' if value is None else repr(value)} was given.",
            f"Write {filter.name}=<{filter.argument}>.",
        )
    return number


def _listed(known: Mapping[str, Filter]) -> str:
    names: Sequence[str] = sorted(known)
    return ", ".join(f"{name}=<{known[name].argument}>" if known[name].argument else name for name in names)
