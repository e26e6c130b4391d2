"""The closing block of a run: figures that add up, and where the files are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gristmill.cli.figures import clock_time, cut, money, percent, short
from gristmill.events import RunEnded

_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


def closing_lines(ended: RunEnded) -> list[str]:
    """All there is to say at the end of a run."""
    what = "sessions" if ended.statistics["reconcile"]["samples"] > 1 else "prompts"
    return [
        f"📊 BATCH PROCESSING COMPLETE: {ended.kept} of {ended.sessions} {what} have a trajectory",
        f"   Prompts processed this run: {ended.processed}",
        f"   Total trajectories in merged file: {ended.merged_rows}",
        f"   Batch files merged: {ended.merged_files}",
        f"   Total duration: {clock_time(ended.seconds)}",
        *statistics_lines(ended.statistics),
        "",
        "📁 Files",
        f"   {ended.directory}",
        *(f"      {name}" for name in ended.files),
    ]


def closing_sentence(ended: RunEnded) -> str:
    """The end in one line."""
    return f"📊 BATCH PROCESSING COMPLETE: {balance(ended.statistics['reconcile'])} · {ended.directory}"


def statistics_lines(statistics: Mapping[str, Any]) -> list[str]:
    """The figures of the whole run, as `statistics.json` has them."""
    reasoning = statistics["reasoning_statistics"]
    turns = reasoning["total_assistant_turns"]
    lines = ["", "Tool Usage Statistics", *_tools(statistics["tool_statistics"]), "", "Reasoning Coverage"]
    lines.append(f"   Total assistant turns: {turns}")
    for name, key in (("With reasoning", "turns_with_reasoning"), ("Without reasoning", "turns_without_reasoning")):
        lines.append(f"   {name}: {reasoning[key]} ({percent(reasoning[key], turns)})")
    lines += ["", f"Samples discarded (zero reasoning): {statistics['discarded_no_reasoning']}"]
    lines += ["", "Outcomes", *_counts(statistics["outcomes"]), f"   {balance(statistics['reconcile'])}"]
    lines += ["", "Tokens and cost", f"   {_tokens(statistics['usage'])}", f"   {_cost(statistics)}"]
    if statistics["turns"]["p50"] is not None:
        lines += ["", "Sessions", *_percentiles(statistics)]
    if statistics["failures_by_reason"]:
        lines += ["", "Failures by reason"]
        for reason, count in statistics["failures_by_reason"].items():
            lines.append(f"   {count} × {reason}: {cut(statistics['failure_examples'].get(reason, ''), 200)}")
    return lines


def balance(counts: Mapping[str, int]) -> str:
    """The equation that must hold: sessions = kept + discarded + filtered + failed + pending."""
    parts = " + ".join(f"{counts[name]} {name}" for name in ("kept", "discarded", "filtered", "failed", "pending"))
    prompts = f"{counts['prompts']} prompts × {counts['samples']}" if counts["samples"] > 1 else f"{counts['prompts']}"
    beyond = counts["no_longer_in_dataset"]
    return f"{prompts}{f' + {beyond} no longer in the dataset' if beyond else ''} = {parts}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need to be; the first is flush left, the others flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        f"   {row[0]:<{widths[0]}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _tools(tools: Mapping[str, Mapping[str, float]]) -> list[str]:
    used = [(name, t) for name, t in tools.items() if t["count"]]
    if not used:
        return ["   No tool was called."]
    used.sort(key=lambda pair: -pair[1]["count"])
    head = ("Tool Name", "Count", "Success", "Failure", "Success Rate")
    rows = [(n, f"{t['count']}", f"{t['success']}", f"{t['failure']}", f"{t['success_rate']:.1f}%") for n, t in used]
    return table([head, *rows])


def _counts(counts: Mapping[str, int]) -> Iterable[str]:
    return table([(name, str(count)) for name, count in counts.items()]) if counts else ["   None yet."]


def _tokens(usage: Mapping[str, int | None]) -> str:
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    if prompt is None or completion is None:
        return "Tokens: unknown"
    more = ", ".join(f"{short(n)} {k}" for k in ("reasoning", "cached") if (n := usage[f"{k}_tokens"]))
    return f"Tokens: {short(prompt)} prompt, {short(completion)} completion{f' ({more})' if more else ''}"


def _cost(statistics: Mapping[str, Any]) -> str:
    return f"Cost of all attempts: {money(statistics['cost_usd'] or 0.0, statistics['cost_known'])}"


def _percentiles(statistics: Mapping[str, Any]) -> list[str]:
    rows: list[Sequence[str]] = [("", *_PERCENTILES)]
    for name, key in (("Turns", "turns"), ("Seconds", "session_seconds")):
        figures = statistics[key]
        if figures["p50"] is not None:
            rows.append((name, *(f"{figures[p]:.4g}" for p in _PERCENTILES)))
    return table(rows)
