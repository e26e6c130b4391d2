"""Rows that another program or version wrote, brought to the schema of the run: those of the reference above all.

A row of the reference has no outcome, reasoning counts, usage nor `tool_calls`; they are worked out from what it has,
or stay neutral (`cost_known` false). Its `tool_stats` has the reference's tools, and names that a model made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from gristmill.conversation import parse_gpt, parse_tool
from gristmill.row_summary import RowSummary
from gristmill.run.layout import Layout
from gristmill.trajectory import conform, decode_row

_SAMPLE = 1000  # rows that are looked at for the tools that they know


def prompt_text(line: Mapping[str, Any]) -> str:
    """The prompt of a line that has no task key: its own field, or the first `human` turn."""
    prompt = line.get("prompt")
    if isinstance(prompt, str):
        return prompt
    for turn in line.get("conversations") or ():
        if isinstance(turn, dict) and turn.get("from") == "human":
            return str(turn.get("value"))
    return ""


def complete_row(data: Mapping[str, Any], summary: RowSummary) -> dict[str, Any]:
    """A decoded row with every key of the schema, its own `tool_stats` included, as filters expect one."""
    row = dict(data)
    row["conversations"] = _with_calls(data.get("conversations"))
    row.setdefault("outcome", summary.outcome)
    turns, reasoned, silent = summary.reasoning
    row.setdefault(
        "reasoning_stats",
        {"total_assistant_turns": turns, "turns_with_reasoning": reasoned, "turns_without_reasoning": silent},
    )
    stats = row.get("tool_stats")
    plain: dict[str, Any] = msgspec.to_builtins(conform(row, tuple(stats) if isinstance(stats, dict) else ()))
    return plain


def _with_calls(turns: Any) -> list[dict[str, Any]]:
    """The turns with `tool_calls`, read from the text where a turn has none; ids come from the results that follow."""
    listed = [dict(turn) for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    for turn, following in zip(listed, [*listed[1:], {}], strict=False):
        if "tool_calls" in turn or turn.get("from") != "gpt":
            continue
        try:
            calls = parse_gpt(str(turn.get("value"))).tool_calls
            ids = [str(result.get("tool_call_id", "")) for result in parse_tool(str(following.get("value", "")))]
        except (msgspec.MsgspecError, AttributeError, KeyError, TypeError):
            continue  # text that merely looks like calls
        ids += [""] * (len(calls) - len(ids))
        turn["tool_calls"] = [
            {"id": id_, "name": call.name, "arguments": call.arguments} for id_, call in zip(ids, calls, strict=False)
        ]
    return listed


def tools_of_rows(layout: Layout) -> list[str]:
    """The tools that rows of the reference know: those that all of them count, for each counts every tool there is."""
    common: dict[str, None] | None = None
    lines = (line for batch in layout.batches() for line in _lines(layout, batch))
    for line in islice(lines, _SAMPLE):
        stats = line.get("tool_stats")
        if isinstance(stats, dict) and stats:
            common = {name: None for name in common if name in stats} if common is not None else dict.fromkeys(stats)
    return sorted(common or ())


def _lines(layout: Layout, batch: int) -> Sequence[dict[str, Any]]:
    found = []
    with layout.batch(batch).open("rb") as file:
        for line in file:
            try:
                found.append(decode_row(line))
            except ValueError:
                continue
    return found
