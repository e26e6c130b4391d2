"""Reasoning is found once, wherever it hides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.model.reasoning import find, split_leading


@pytest.mark.parametrize(
    ("text", "reasoning", "visible"),
    [
        ("plain", "", "plain"),
        ("<think>a</think>b", "a", "b"),
        ("\n <thinking>\na\n</thinking>\n\nb ", "a", "b"),
        ("<REASONING_SCRATCHPAD>a</REASONING_SCRATCHPAD>b", "a", "b"),
        ("<THINK>a</think>b", "a", "b"),
        ("<think></think>b", "", "b"),
        ("<think>a</think><think>b</think>c", "a\n\nb", "c"),
        ("<think>a <thinking> b</think>c", "a <thinking> b", "c"),
        ("<think>never closed", "never closed", ""),
        ("notes\n</think>\nanswer", "notes", "answer"),
        ("notes</think>\n\nanswer", "notes", "answer"),
        ("</think>\nanswer", "", "answer"),
        ("notes</think>", "notes", ""),
        ("Close it with `</think>` please.", "", "Close it with `</think>` please."),
        ("Write </think> there.", "", "Write </think> there."),
        ("Use `<think>draft</think>` as an example.", "", "Use `<think>draft</think>` as an example."),
        ("```\n</think>\n```", "", "```\n</think>\n```"),
        ("Say <think>\nx\n</think>\ny", "", "Say <think>\nx\n</think>\ny"),
    ],
)
def test_a_leading_block_is_reasoning_and_a_mention_is_not(text: str, reasoning: str, visible: str) -> None:
    assert split_leading(text) == (reasoning, visible)


def test_the_raw_text_is_kept_where_it_was_split() -> None:
    assert find({"content": "<think>a</think>b"}).raw == {"content": "<think>a</think>b"}
    assert find({"content": "b"}).raw == {}


def test_a_field_wins_over_the_text() -> None:
    found = find({"content": "<think>x</think>y", "reasoning": "R"})
    assert (found.text, found.reasoning) == ("<think>x</think>y", "R")


def test_an_empty_field_does_not_hide_the_text() -> None:
    found = find({"content": "<think>x</think>y", "reasoning": "", "reasoning_content": None})
    assert (found.text, found.reasoning) == ("y", "x")


def test_readable_details_are_not_hidden_by_an_encrypted_one() -> None:
    details = [{"type": "reasoning.summary", "summary": "S"}, {"type": "reasoning.encrypted", "data": "…"}]
    found = find({"content": "a", "reasoning_details": details})
    assert (found.reasoning, found.hidden) == ("S", False)
    assert found.raw["reasoning_details"] is details


def test_redacted_thinking_parts_do_not_show_in_the_text() -> None:
    content = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}, {"type": "image_url"}]
    assert find({"content": content}).text == "a[image_url]"


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "`", " "]), max_size=12).map("".join))
def test_splitting_loses_no_word(text: str) -> None:
    reasoning, visible = split_leading(text)
    assert (reasoning + visible).count("a") == text.count("a")
