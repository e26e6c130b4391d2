"""Filters: what each drops and why, how they are named, and that the screening by summaries never hides a row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import UsageError
from gristmill.quality.base import ActiveFilter, Filter, FilterContext
from gristmill.quality.filters import FILTERS, parse_filters
from gristmill.row_summary import summarize
from gristmill.trajectory import ReasoningStats, decode_row, encode_row
from gristmill.types import Outcome, Usage
from support.rundir import TOOLS, row, tasks

TASK = tasks(["p"])[0]
KNOWN = frozenset(TOOLS)


def judge(name: str, argument: float | None = None, **changes: Any) -> str:
    data = decode_row(encode_row(row(TASK, **changes)))
    return FILTERS[name].judge(data, FilterContext(known_tools=KNOWN, argument=argument))


def test_no_reasoning_goes_by_the_counts_which_include_hidden_reasoning() -> None:
    none = ReasoningStats(total_assistant_turns=2, turns_with_reasoning=0, turns_without_reasoning=2)
    one = ReasoningStats(total_assistant_turns=2, turns_with_reasoning=1, turns_without_reasoning=1)
    assert judge("no_reasoning", reasoning_stats=none) == "no reasoning in any turn"
    assert judge("no_reasoning", reasoning_stats=one) == ""
    assert FILTERS["no_reasoning"].when == "session"


def test_unknown_tool_names_the_call() -> None:
    assert judge("unknown_tool", calls=[("terminal", True)]) == ""
    assert judge("unknown_tool", calls=[("terminl", False), ("terminal", True)]) == "invalid tool 'terminl'"
    # A row of the reference has no `tool_calls`; its made-up names stand in `tool_stats`.
    reference = {"conversations": [{"from": "gpt", "value": "v"}], "tool_stats": {"frob": {"count": 1}}}
    reason = FILTERS["unknown_tool"].judge(reference, FilterContext(known_tools=KNOWN))
    assert reason == "invalid tool 'frob'"
    message = ActiveFilter(FILTERS["unknown_tool"]).message(3, reason)
    assert message == "⚠️  Filtering corrupted entry (batch 3): invalid tool 'frob'"


def test_duplicates_keep_the_first_and_look_past_the_system_turn() -> None:
    context = FilterContext()
    drop = FILTERS["duplicates"].judge
    first = decode_row(encode_row(row(TASK)))
    second = decode_row(encode_row(row(TASK)))
    second["conversations"][0]["value"] = "other tools were offered"
    other = decode_row(encode_row(row(TASK, text="another answer")))
    assert [bool(drop(data, context)) for data in (first, other, second, other)] == [False, False, True, True]


def test_the_filters_with_numbers() -> None:
    assert judge("completed_only", outcome="turn_limit") == "ended as turn_limit"
    assert judge("completed_only") == ""
    assert judge("min_tool_calls", 2, calls=[("terminal", True)]) == "1 tool calls, fewer than 2"
    assert judge("min_tool_calls", 2, calls=[("made_up", False)] * 2) == ""
    assert judge("min_reward", 0.5) == "not graded"
    assert judge("min_reward", 0.5, graded=True, reward=0.25) == "reward 0.25, less than 0.5"
    assert judge("min_reward", 0.5, graded=True, reward=0.5) == ""
    assert judge("max_tokens", 119) == "120 tokens, more than 119"
    assert judge("max_tokens", 120) == ""


@given(
    calls=st.lists(st.tuples(st.sampled_from([*TOOLS, "made_up"]), st.booleans()), max_size=4),
    outcome=st.sampled_from([o for o in Outcome if o.kept]),
    reward=st.none() | st.floats(-1, 2),
    tokens=st.integers(0, 300),
    reasoned=st.integers(0, 2),
    number=st.floats(0, 3) | st.integers(0, 300),
)
def test_a_row_that_is_dropped_is_always_suspected(
    calls: list[tuple[str, bool]], outcome: Outcome, reward: float | None, tokens: int, reasoned: int, number: float
) -> None:
    made = row(
        TASK,
        calls=calls,
        outcome=outcome,
        graded=reward is not None,
        reward=reward or 0.0,
        usage=Usage(prompt_tokens=tokens),
        reasoning_stats=ReasoningStats(turns_with_reasoning=reasoned),
    )
    line = encode_row(made)
    for rule in FILTERS.values():
        if rule.suspects is None:
            continue
        context = FilterContext(known_tools=KNOWN, argument=float(number) if rule.argument else None)
        if rule.judge(decode_row(line), context):
            assert rule.suspects(summarize(line), context), rule.name


def test_names_and_numbers_of_the_flag() -> None:
    active = parse_filters(" no_reasoning, unknown_tool ,min_reward=0.5")
    assert [(a.name, a.argument) for a in active] == [
        ("no_reasoning", None),
        ("unknown_tool", None),
        ("min_reward", 0.5),
    ]
    assert parse_filters(("max_tokens=2e3",))[0].argument == 2000.0
    assert parse_filters("none") == parse_filters(()) == parse_filters(("none",)) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no_such", ["Unknown filter: 'no_such'", "unknown_tool", "min_reward=<reward>", "'none' switches"]),
        ("", ["Unknown filter: ''"]),
        ("none,unknown_tool", ["Unknown filter: 'none'"]),
        ("min_reward", ["min_reward needs a number, none was given", "min_reward=<reward>"]),
        ("min_reward=", ["needs a number"]),
        ("min_reward=high", ["needs a number, 'high' was given"]),
        ("min_reward=nan", ["needs a number"]),
        ("max_tokens=inf", ["needs a number"]),
        ("unknown_tool=1", ["takes no value"]),
        ("unknown_tool,unknown_tool", ["given twice"]),
    ],
)
def test_a_wrong_flag_says_what_is_wrong(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_filters(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_filters_of_ones_own_are_named_in_the_same_way() -> None:
    mine = Filter("mine", "merge", lambda data, context: "no")
    assert parse_filters("mine,unknown_tool", {**FILTERS, "mine": mine})[0].filter is mine


def test_the_document_names_every_filter() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "filters.md").read_text(encoding="utf-8")
    for name in FILTERS:
        assert f"`{name}" in text
