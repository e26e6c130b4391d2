"""Statistics: sums that agree with the rows, numbers that reconcile, unknown told from zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.stats import Facts, Fold, RowSummary, fold, summarize
from gristmill.trajectory import ReasoningStats, decode_row, encode_row
from gristmill.types import ErrorInfo, Usage
from support.rundir import TOOLS, discarded, failed, kept, row, tasks

TASKS = tasks([f"task {n}" for n in range(10)])
FACTS = Facts(run_name="r", prompts=10, known_tools=TOOLS)


def summary_of(finished: Any) -> RowSummary:
    found = summarize(finished.row)
    assert found == summarize(decode_row(finished.row))  # bytes and objects are read alike
    return found


def test_a_kept_row() -> None:
    found = summary_of(kept(TASKS[3], sample=2, calls=[("terminal", True), ("terminal", False), ("frob", False)]))
    assert (found.state, found.outcome, found.prompt_index, found.sample) == ("kept", "completed", 3, 2)
    assert found.task_key == TASKS[3].key
    assert found.tools == {"terminal": (2, 1, 1)} and found.unknown_calls == {"frob": 1} and found.calls == 3
    assert found.usage == Usage(prompt_tokens=100, completion_tokens=20, cost_usd=0.25)
    assert found.toolsets_used == ("terminal", "file") and found.reasoning == (2, 2, 0)


def test_a_discard_and_a_failure() -> None:
    gone = summary_of(discarded(TASKS[0], by="mine"))
    assert (gone.state, gone.discarded, gone.task_key) == ("discarded", "mine", TASKS[0].key)
    lost = summary_of(failed(TASKS[1], attempt=3))
    assert (lost.state, lost.outcome, lost.attempt) == ("failed", "model_error", 3)
    assert lost.error == ErrorInfo(type="transient", message="bad gateway", status=502)


def test_a_row_of_the_reference() -> None:
    turns = [
        {"from": "human", "value": "p"},
        {"from": "gpt", "value": "<think>\nyes\n</think>\nx"},
        {"from": "gpt", "value": "<think>\n</think>\nx"},
        {"from": "gpt", "value": "I mention <think>a</think>"},
    ]
    base: dict[str, Any] = {"prompt_index": 1, "conversations": turns, "api_calls": 3, "metadata": {"batch_num": 0}}
    done = summarize({**base, "completed": True, "partial": False})
    assert (done.outcome, done.reasoning, done.usage, done.task_key) == ("completed", (3, 1, 2), None, "")
    assert summarize({**base, "completed": False, "partial": True}).outcome == "partial"
    assert summarize({**base, "completed": False, "partial": False}).outcome == "turn_limit"
    odd = summarize({**base, "completed": "yes", "tool_stats": None, "toolsets_used": None, "api_calls": None})
    assert (odd.state, odd.api_calls, odd.tools) == ("kept", 0, {})


@pytest.mark.parametrize(
    "line", [b"{}", b'{"p":"ok"}', b'{"conversations":"x"}', b"5", b"nonsense", b'{"failed":false}']
)
def test_what_is_no_outcome_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        summarize(line)


def test_every_figure_of_a_small_run() -> None:
    lines = [
        kept(TASKS[0], calls=[("terminal", True), ("read_file", False)]),
        kept(TASKS[1], calls=(), outcome="turn_limit", graded=True, reward=1.0, duration_seconds=4.5),
        kept(TASKS[2], calls=[("frob", False)]),
        discarded(TASKS[3]),
        discarded(TASKS[4], by="mine"),
        failed(TASKS[5]),
        failed(TASKS[6], status=0),
    ]
    total = Fold()
    for line in lines:
        total.add(summary_of(line))
    total.add(summary_of(kept(TASKS[7])), filtered="min_reward")
    total.add_repeated(summary_of(failed(TASKS[0])))
    found = total.result(FACTS)
    assert found["tool_statistics"]["terminal"] == {
        "count": 1,
        "success": 1,
        "failure": 0,
        "success_rate": 100.0,
        "failure_rate": 0.0,
    }
    assert (
        found["tool_statistics"]["process"]["success_rate"] == 0.0 and list(found["tool_statistics"])[-1] != "terminal"
    )
    assert "frob" not in found["tool_statistics"] and found["unknown_tool_calls"] == {"frob": 1}
    assert found["outcomes"] == {"completed": 2, "model_error": 2, "turn_limit": 1}
    assert found["discarded"] == {"mine": 1, "no_reasoning": 1} and found["discarded_no_reasoning"] == 1
    assert found["filtered"] == {"min_reward": 1}
    assert found["failures_by_reason"] == {"transient": 1, "transient 502": 1}
    assert found["failure_examples"]["transient 502"] == "bad gateway"
    assert found["reconcile"] == {
        "prompts": 10,
        "samples": 1,
        "sessions": 10,
        "kept": 3,
        "discarded": 2,
        "filtered": 1,
        "failed": 2,
        "pending": 2,
        "no_longer_in_dataset": 0,
    }
    assert found["attempts"] == 9
    # Spent is everything; the share of the kept rows is told apart.
    assert found["cost_usd"] == pytest.approx(3 * 0.25 + 2 * 0.5 + 2 * 0.125 + 0.25 + 0.125)
    assert found["trajectories"]["cost_usd"] == 0.75 and found["trajectories"]["usage"]["prompt_tokens"] == 300
    assert found["turns"]["max"] == 2 and found["session_seconds"]["max"] == 4.5
    assert found["rewards"]["graded"] == 1 and found["rewards"]["mean"] == 1.0
    assert found["toolset_frequencies"]["file"] == {"sessions": 3, "percent": 100.0}


def test_unknown_is_null_and_not_zero() -> None:
    nothing = fold([], FACTS)
    assert nothing["turns"]["p50"] is None and nothing["cost_usd"] == 0.0 and nothing["cost_known"] is True
    reference = summarize({"conversations": [{"from": "gpt", "value": ""}], "completed": True})
    unknown = fold([reference], FACTS)
    assert unknown["cost_usd"] is None and unknown["cost_known"] is False
    assert unknown["usage"]["prompt_tokens"] is None and unknown["session_seconds"]["max"] is None
    priceless = summarize(encode_row(row(TASKS[0], usage=Usage(prompt_tokens=5, cost_known=False))))
    mixed = fold([priceless, summary_of(kept(TASKS[1]))], FACTS)
    assert mixed["cost_usd"] == 0.25 and mixed["cost_known"] is False and mixed["usage"]["prompt_tokens"] == 105


SUMMARIES = st.lists(
    st.builds(
        lambda state, index, tools, turns, seconds: RowSummary(
            state=state,
            outcome="completed" if state == "kept" else "model_error",
            prompt_index=index,
            tools=tools,
            api_calls=turns,
            reasoning=(turns, turns // 2, turns - turns // 2),
            usage=Usage(prompt_tokens=turns, cost_usd=seconds),
            duration_seconds=seconds,
            discarded="no_reasoning" if state == "discarded" else "",
        ),
        st.sampled_from(["kept", "discarded", "failed"]),
        st.integers(0, 99),
        st.dictionaries(st.sampled_from(TOOLS), st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))),
        st.integers(0, 50),
        st.floats(0, 100),
    ),
    max_size=40,
)


@given(SUMMARIES, st.integers(0, 5), st.integers(0, 60))
def test_sums_and_percentiles_agree_with_the_rows(summaries: list[RowSummary], beyond: int, prompts: int) -> None:
    found = fold(summaries, Facts(run_name="r", prompts=prompts, beyond=beyond, known_tools=TOOLS))
    rows = [s for s in summaries if s.state == "kept"]
    for name in TOOLS:
        assert found["tool_statistics"][name]["count"] == sum(s.tools.get(name, (0,))[0] for s in rows)
    assert found["reasoning_statistics"]["total_assistant_turns"] == sum(s.reasoning[0] for s in rows)
    counts = found["reconcile"]
    ended = counts["kept"] + counts["discarded"] + counts["filtered"] + counts["failed"]
    assert ended == len(summaries) and counts["pending"] >= 0
    assert counts["sessions"] + counts["no_longer_in_dataset"] == ended + counts["pending"]
    turns = sorted(s.api_calls for s in rows)
    for percent in (50, 90, 95, 99):
        expected = turns[max(0, math.ceil(percent * len(turns) / 100) - 1)] if turns else None
        assert found["turns"][f"p{percent}"] == expected
    assert found["cost_usd"] == pytest.approx(sum(s.usage.cost_usd for s in summaries if s.usage), abs=1e-5)


def test_the_number_of_reasons_and_made_up_names_is_bounded() -> None:
    failures = [
        RowSummary(state="failed", outcome="model_error", prompt_index=n, error=ErrorInfo(type=f"t{n}", message=""))
        for n in range(200)
    ]
    reasons = fold(failures, FACTS)["failures_by_reason"]
    assert len(reasons) <= 51 and sum(reasons.values()) == 200 and reasons["(others)"] == 150


def test_reasoning_counts_come_from_the_row() -> None:
    stats = ReasoningStats(total_assistant_turns=5, turns_with_reasoning=3, turns_without_reasoning=2)
    assert summarize(encode_row(row(TASKS[0], reasoning_stats=stats))).reasoning == (5, 3, 2)
