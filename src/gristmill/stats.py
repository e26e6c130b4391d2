"""Statistics are a fold over the lines of the batch files: each gives a `RowSummary`, all of them `statistics.json`.

What agrees with what: `tool_statistics`, `reasoning_statistics`, `outcomes` of kept rows, `turns`, `session_seconds`,
`toolset_frequencies` and `rewards` are sums over `trajectories.jsonl`. `usage` and `cost_usd` are what the run has
spent, discarded, failed and repeated sessions included; `trajectories` holds the share of the kept rows. Where a prompt
was tried several times, its last attempt counts. What no line tells is null, never 0.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from gristmill.row_summary import RowSummary, summarize
from gristmill.types import ErrorInfo, Usage

__all__ = ["Facts", "Fold", "RowSummary", "fold", "summarize"]

_PERCENTILES = (50, 90, 95, 99)
_LISTED = 50  # different failure reasons and made-up tool names that are told apart


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What statistics say of the run besides its lines.

    `prompts` are the usable rows of the dataset, `refused` the others. `beyond` counts outcomes that the dataset no
    longer asks for (rows were removed from it since). `duration_seconds` is that of all invocations together.
    """

    run_name: str
    distribution: str = ""
    model: str = ""
    batch_size: int = 0
    batches: int = 0
    prompts: int = 0
    refused: int = 0
    samples: int = 1
    seed: int = 0
    known_tools: tuple[str, ...] = ()
    beyond: int = 0
    unreadable_lines: int = 0
    completed_at: str = ""
    duration_seconds: float = 0.0


class Fold:
    """Adds up summaries one by one; memory grows with a few bytes for each kept row."""

    def __init__(self) -> None:
        self._rows = 0
        self._discarded: Counter[str] = Counter()
        self._filtered: Counter[str] = Counter()
        self._failed = 0
        self._attempts = 0
        self._outcomes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._tools: dict[str, list[int]] = {}
        self._unknown: Counter[str] = Counter()
        self._toolsets: Counter[str] = Counter()
        self._reasoning = [0, 0, 0]
        self._turns = array("q")
        self._seconds = array("d")
        self._rewards = array("d")
        self._spent = _Spent()
        self._kept_spent = _Spent()

    def add(self, summary: RowSummary, *, filtered: str = "") -> None:
        """Count the last attempt of a prompt; `filtered` names the merge filter that leaves its row out."""
        self.add_repeated(summary)
        if summary.state == "discarded":
            self._discarded[summary.discarded] += 1
        elif summary.state == "failed":
            self._failed += 1
            self._outcomes[summary.outcome] += 1
            self._add_failure(summary)
        elif filtered:
            self._filtered[filtered] += 1
        else:
            self._add_row(summary)

    def add_repeated(self, summary: RowSummary) -> None:
        """Count an attempt that a later one replaced: only what it cost."""
        self._attempts += 1
        self._spent.add(summary.usage)

    def _add_failure(self, summary: RowSummary) -> None:
        error = summary.error or ErrorInfo(type=summary.outcome, message="")
        reason = _capped(f"{error.type} {error.status}" if error.status else error.type, self._failures)
        self._failures[reason] += 1
        self._examples.setdefault(reason, error.message[:300])

    def _add_row(self, summary: RowSummary) -> None:
        self._rows += 1
        self._outcomes[summary.outcome] += 1
        for name, counts in summary.tools.items():
            totals = self._tools.setdefault(name, [0, 0, 0])
            for position, count in enumerate(counts):
                totals[position] += count
        for name, calls in summary.unknown_calls.items():
            self._unknown[_capped(name, self._unknown)] += calls
        self._toolsets.update(summary.toolsets_used)
        for position, turns in enumerate(summary.reasoning):
            self._reasoning[position] += turns
        self._turns.append(summary.api_calls)
        if summary.usage is not None:  # only the reference's rows have none, and no duration either
            self._seconds.append(summary.duration_seconds)
        if summary.graded:
            self._rewards.append(summary.reward)
        self._kept_spent.add(summary.usage)

    def result(self, facts: Facts) -> dict[str, Any]:
        """`statistics.json`: the reference's keys first, then what it lacks."""
        turns, with_reasoning, without = self._reasoning
        return {
            "run_name": facts.run_name,
            "distribution": facts.distribution,
            "total_prompts": facts.prompts,
            "total_batches": facts.batches,
            "batch_size": facts.batch_size,
            "model": facts.model,
            "completed_at": facts.completed_at,
            "duration_seconds": round(facts.duration_seconds, 2),
            "tool_statistics": self._tool_statistics(facts.known_tools),
            "reasoning_statistics": {
                "total_assistant_turns": turns,
                "turns_with_reasoning": with_reasoning,
                "turns_without_reasoning": without,
            },
            "discarded_no_reasoning": self._discarded["no_reasoning"],
            "seed": facts.seed,
            "reconcile": self._reconcile(facts),
            "outcomes": _by_count(self._outcomes),
            "discarded": _by_count(self._discarded),
            "filtered": _by_count(self._filtered),
            "failures_by_reason": _by_count(self._failures),
            "failure_examples": self._examples,
            "refused_rows": facts.refused,
            "unreadable_lines": facts.unreadable_lines,
            "attempts": self._attempts,
            "usage": self._spent.tokens(),
            "cost_usd": self._spent.cost(),
            "cost_known": self._spent.known,
            "trajectories": {
                "rows": self._rows,
                "usage": self._kept_spent.tokens(),
                "cost_usd": self._kept_spent.cost(),
                "cost_known": self._kept_spent.known,
            },
            "turns": _distribution(self._turns),
            "session_seconds": _distribution(self._seconds),
            "toolset_frequencies": {
                name: {"sessions": count, "percent": _percent(count, self._rows)}
                for name, count in _by_count(self._toolsets).items()
            },
            "unknown_tool_calls": _by_count(self._unknown),
            "rewards": _distribution(self._rewards)
            | {"graded": len(self._rewards), "positive": sum(reward > 0 for reward in self._rewards)},
        }

    def _reconcile(self, facts: Facts) -> dict[str, int]:
        sessions = facts.prompts * facts.samples
        discarded, filtered = self._discarded.total(), self._filtered.total()
        recorded = self._rows + discarded + filtered + self._failed
        pending = max(0, sessions + facts.beyond - recorded)
        return {
            "prompts": facts.prompts,
            "samples": facts.samples,
            "sessions": sessions,
            "kept": self._rows,
            "discarded": discarded,
            "filtered": filtered,
            "failed": self._failed,
            "pending": pending,
            "no_longer_in_dataset": recorded + pending - sessions,
        }

    def _tool_statistics(self, known: tuple[str, ...]) -> dict[str, dict[str, float]]:
        names = sorted({*known, *self._tools}, key=lambda name: (-self._tools.get(name, [0])[0], name))
        statistics: dict[str, dict[str, float]] = {}
        for name in names:
            count, success, failure = self._tools.get(name, (0, 0, 0))
            statistics[name] = {
                "count": count,
                "success": success,
                "failure": failure,
                "success_rate": _percent(success, count),
                "failure_rate": _percent(failure, count),
            }
        return statistics


def fold(summaries: Iterable[RowSummary], facts: Facts) -> dict[str, Any]:
    """`statistics.json` of summaries of which none replaces another."""
    total = Fold()
    for summary in summaries:
        total.add(summary)
    return total.result(facts)


class _Spent:
    """A sum of usages that knows what it does not know."""

    def __init__(self) -> None:
        self._prompt = self._completion = self._reasoning = self._cached = 0
        self._cost = 0.0
        self._told = 0
        self.known = True

    def add(self, usage: Usage | None) -> None:
        if usage is None:
            self.known = False
            return
        self._told += 1
        self._prompt += usage.prompt_tokens
        self._completion += usage.completion_tokens
        self._reasoning += usage.reasoning_tokens
        self._cached += usage.cached_tokens
        self._cost += usage.cost_usd
        self.known = self.known and usage.cost_known

    def tokens(self) -> dict[str, int | None]:
        counts = (self._prompt, self._completion, self._reasoning, self._cached)
        names = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")
        # Lines of the reference alone tell no tokens at all.
        return {name: count if self._told or self.known else None for name, count in zip(names, counts, strict=True)}

    def cost(self) -> float | None:
        return round(self._cost, 6) if self.known or self._cost else None


def _capped(name: str, counted: Counter[str]) -> str:
    return name if name in counted or len(counted) < _LISTED else "(others)"


def _by_count(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted((pair for pair in counter.items() if pair[1]), key=lambda pair: (-pair[1], pair[0])))


def _percent(part: float, whole: float) -> float:
    return round(100.0 * part / whole, 2) if whole else 0.0


def _distribution(values: array[int] | array[float]) -> dict[str, Any]:
    """Mean, extremes and nearest-rank percentiles; null without values."""
    if not values:
        return dict.fromkeys(("mean", "min", *(f"p{p}" for p in _PERCENTILES), "max"))
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in _PERCENTILES}
    mean = math.fsum(ordered) / len(ordered)
    figures = {"mean": mean, "min": ordered[0], **ranks, "max": ordered[-1]}
    return {name: round(value, 3) for name, value in figures.items()}
