"""Text for a model: valid, bounded, never cut inside a character."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tools.text import (
    bounded,
    decode,
    decode_output,
    json_text,
    last_part,
    shorten,
    shown_text,
    without_torn_end,
)

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # one sign of five code points
NOTICE = re.compile(r"\n\n\[… ([\d,]+) (characters|bytes) left out …\]\n\n")


def parts(text: str) -> tuple[str, int, str]:
    head, count, _, tail = NOTICE.split(text)
    return head, int(count.replace(",", "")), tail


def test_a_text_within_the_limit_is_itself() -> None:
    assert shorten("x" * 50_000, 50_000) == "x" * 50_000


def test_a_long_text_keeps_its_head_and_tail_and_says_what_is_missing() -> None:
    text = "".join(f"{number:6d}\n" for number in range(20_000))
    cut = shorten(text, 50_000)
    head, left_out, tail = parts(cut)
    assert 49_990 < len(cut) <= 50_000
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + left_out + len(tail) == len(text)
    assert len(head) == pytest.approx(0.4 * 50_000, rel=0.01)


@pytest.mark.parametrize("unit", [FAMILY, "e\u0301", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "❤\ufe0f", "\r\n"])
def test_no_cut_parts_what_is_shown_as_one(unit: str) -> None:
    text = unit * 300
    for limit in range(100, 160):
        cut = shorten(text, limit)
        head, left_out, tail = parts(cut)
        assert len(cut) <= limit
        assert head == unit * (len(head) // len(unit))
        assert tail == unit * (len(tail) // len(unit))
        assert len(head) + left_out + len(tail) == len(text)
        short = bounded(text, limit)
        assert len(short) <= limit
        assert short == unit * ((len(short) - 1) // len(unit)) + "…"
        end = last_part(text, limit)
        assert len(end) <= limit
        assert end == "…" + unit * ((len(end) - 1) // len(unit))


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=200), st.integers(1, 120))
@settings(max_examples=300, deadline=None)
def test_no_result_is_longer_than_its_limit(text: str, limit: int) -> None:
    for cut in (shorten(text, limit), bounded(text, limit), last_part(text, limit)):
        assert len(cut) <= limit
        assert cut == text or len(text) > limit


def test_a_long_chain_of_marks_does_not_swallow_the_room() -> None:
    cut = shorten("e" + "\u0301" * 100_000, 1000)
    assert 800 < len(cut) <= 1000


@given(st.text(st.sampled_from("aé€😀\u200d\u0301"), min_size=30, max_size=60), st.data())
@settings(max_examples=300, deadline=None)
def test_a_gap_in_the_bytes_makes_no_replacement_character(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    first = data.draw(st.integers(0, len(raw)))
    second = data.draw(st.integers(first, len(raw)))
    kept = raw[:first] + raw[second:]
    shown, binary = decode_output(kept, max(1, second - first), first, 500)
    assert "\ufffd" not in shown
    assert not binary
    head, _, tail = parts(shown)
    assert text.startswith(head)
    assert text.endswith(tail)


def test_the_notice_of_a_gap_counts_bytes() -> None:
    shown, _ = decode_output(b"a" * 200 + b"z" * 300, 1_000_000, 200, 300)
    head, left_out, tail = parts(shown)
    assert len(head) + left_out + len(tail) == 1_000_500
    assert len(shown) <= 300


def test_torn_ends_are_found_and_whole_ones_kept() -> None:
    for character in "aé€😀":
        raw = character.encode()
        assert without_torn_end(b"x" + raw) == b"x" + raw
        for cut in range(1, len(raw)):
            assert without_torn_end(b"x" + raw[:cut]) == b"x"
    assert without_torn_end(b"\x80\x80\x80\x80") == b"\x80\x80\x80\x80"  # was not UTF-8 before any cut
    assert without_torn_end(b"") == b""


def test_bytes_that_are_no_text_are_shown_and_named() -> None:
    assert decode(b"plain \xc3\xa9") == ("plain é", False)
    assert decode(b"\xd6\xd0\xce\xc4")[1] is True
    assert decode(b"a\0b") == ("a\\x00b", True)
    assert shown_text("a\0b\ud800") == "a\\x00b\ufffd"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": "b\0\ud800"}, '{"a":"b\\u0000\ufffd"}'),
        ({"n": 10**30}, '{"n":"1000000000000000000000000000000"}'),
        ({"n": float("nan")}, '{"n":null}'),
        ({1: 2, None: 3}, '{"1":2,"null":3}'),
        ({"o": {1}}, '{"o":"{1}"}'),
        ({"b": b"x"}, '{"b":"b\'x\'"}'),
        ([], "[]"),
        (0, "0"),
        (False, "false"),
    ],
)
def test_any_value_has_a_json_text(value: Any, text: str) -> None:
    assert json_text(value) == text


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_endless_values_have_a_json_text_too() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (loop, {"a": 2**100_000}, deep, {"o": Unspeakable(), Unspeakable(): 1}):
        text = json_text(value)
        assert len(text) < 100_000
        orjson.loads(text)


@given(st.recursive(st.none() | st.text(st.characters(exclude_categories=())) | st.integers(), st.lists, max_leaves=20))
@settings(max_examples=200, deadline=None)
def test_json_text_is_always_valid(value: Any) -> None:
    orjson.loads(json_text(value))
