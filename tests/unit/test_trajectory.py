"""Rows: one schema whatever happens, encoded without ever failing, read back as they were meant."""

from __future__ import annotations

import datetime
import io
import json
import math
from typing import Any

import msgspec
import pyarrow.json
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.trajectory import (
    INT_LIMIT,
    Failure,
    Row,
    Tombstone,
    Turn,
    conform,
    decode_row,
    encode_failure,
    encode_row,
    encode_tombstone,
    full_timestamp,
    mend,
    timestamp,
    tool_columns,
    turns_of,
)
from gristmill.types import ErrorInfo, Usage
from support.rundir import TOOLS, row, tasks

TASK = tasks(["What is it?"])[0]
KEYS = [
    "prompt_index",
    "conversations",
    "metadata",
    "completed",
    "partial",
    "outcome",
    "api_calls",
    "toolsets_used",
    "tool_stats",
    "tool_error_counts",
    "reasoning_stats",
    "usage",
    "duration_seconds",
    "graded",
    "reward",
]
ANY_TEXT = st.text(st.characters(), max_size=30)  # lone surrogates included
ANY_INT = st.integers(-(2**80), 2**80)
ANY_FLOAT = st.floats() | st.integers(-5, 5)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | ANY_INT | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


def types_of(value: Any) -> Any:
    """The shape of a value: keys in order and types; lists of anything count as one type."""
    if isinstance(value, dict):
        return {key: types_of(inner) for key, inner in value.items()}
    return type(value).__name__


def shape(line: bytes) -> Any:
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    data = json.loads(line.decode("utf-8"))
    found = types_of(data)
    for turn in data["conversations"]:
        assert types_of(turn) == {"from": "str", "value": "str", "tool_calls": "list"}
        for made in turn["tool_calls"]:
            assert types_of(made) == {"id": "str", "name": "str", "arguments": "str"}
    return found


USUAL = shape(encode_row(row(TASK)))


def test_keys_stand_in_the_order_of_the_contract() -> None:
    data = json.loads(encode_row(row(TASK)))
    assert list(data) == KEYS
    assert list(data["conversations"][0]) == ["from", "value", "tool_calls"]
    assert list(data["metadata"]) == [
        "batch_num",
        "timestamp",
        "model",
        "row_id",
        "row",
        "task_key",
        "sample",
        "seed",
    ]
    assert list(data["usage"]) == [
        "prompt_tokens",
        "completion_tokens",
        "reasoning_tokens",
        "cached_tokens",
        "cost_usd",
        "cost_known",
    ]
    assert list(data["tool_stats"]) == list(data["tool_error_counts"]) == list(TOOLS)


@given(
    text=ANY_TEXT,
    number=ANY_INT,
    cost=ANY_FLOAT,
    seconds=ANY_FLOAT,
    reward=ANY_FLOAT,
    tokens=ANY_INT,
)
def test_any_content_gives_the_same_schema(
    text: str, number: int, cost: float, seconds: float, reward: float, tokens: int
) -> None:
    made = row(
        TASK,
        text=text,
        prompt_index=number,
        usage=Usage(prompt_tokens=tokens, cost_usd=cost),
        duration_seconds=seconds,
        reward=reward,
    )
    made.metadata.seed = number
    made.metadata.row_id = text
    line = encode_row(made)
    assert shape(line) == USUAL
    back = decode_row(line)
    assert back["conversations"][-1]["value"].endswith(mend(text))
    assert back["metadata"]["row_id"] == mend(text)
    assert abs(back["prompt_index"]) <= INT_LIMIT and abs(back["metadata"]["seed"]) <= INT_LIMIT
    if abs(number) <= INT_LIMIT:
        assert back["prompt_index"] == number
    assert math.isfinite(back["reward"]) and back["reward"] == (reward if math.isfinite(reward) else 0.0)
    assert back["usage"]["cost_usd"] == (cost if math.isfinite(cost) else 0.0)


def test_a_lone_surrogate_costs_no_neighbour() -> None:
    line = encode_row(row(TASK, text="cut \ud83d here \U0001f600 \udc00é"))
    assert decode_row(line)["conversations"][-1]["value"].endswith("cut \ufffd here \U0001f600 \ufffdé")


def test_wrong_types_of_a_careless_writer_do_not_reach_the_file() -> None:
    made = row(TASK)
    made.reward = 1  # an int where a float belongs
    made.metadata.row_id = None  # type: ignore[assignment]
    made.usage = Usage(prompt_tokens=True, cost_usd=0)
    line = encode_row(made)
    assert shape(line) == USUAL
    assert b'"reward":1.0' in line and b'"row_id":""' in line and b'"cost_usd":0.0' in line


@given(ANY_JSON, st.lists(st.sampled_from(KEYS), max_size=15))
def test_any_object_conforms(value: Any, keys: list[str]) -> None:
    data = dict.fromkeys(keys, value)
    line = encode_row(conform(data, TOOLS))
    assert shape(line) == USUAL
    again = msgspec.json.decode(line, type=Row)
    assert encode_row(again) == line


def test_every_row_has_one_arrow_schema() -> None:
    odd = [
        row(TASK, calls=()),
        row(TASK, text="\x00 \U0001f600 \ud800 \u2028", outcome="turn_limit"),
        row(TASK, graded=True, reward=0.5, calls=[("terminal", False)] * 3),
    ]
    usual = pyarrow.json.read_json(io.BytesIO(encode_row(row(TASK)))).schema
    for made in odd[1:]:
        assert pyarrow.json.read_json(io.BytesIO(encode_row(made))).schema == usual
    together = b"".join(encode_row(made) for made in (odd[2], *odd))
    assert pyarrow.json.read_json(io.BytesIO(together)).schema == usual


def test_timestamps_always_have_microseconds_and_an_offset() -> None:
    whole = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert timestamp(whole).endswith(":00:00.000000+00:00") or ".000000" in timestamp(whole)
    for text in (timestamp(), timestamp(whole), full_timestamp("2026-01-01T00:00:00"), full_timestamp("junk")):
        at = datetime.datetime.fromisoformat(text)
        assert at.tzinfo is not None and len(text.split(".")[1]) == len("000000+00:00")
    assert full_timestamp("2026-11-29T14:31:53.352315").startswith("2026-11-29T14:31:53.352315")
    assert full_timestamp("2026-01-01T00:00:00+02:00") == "2026-01-01T00:00:00.000000+02:00"
    assert full_timestamp(None).startswith("1970-01-01T00:00:00.000000")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not JSON"),
        (b"\x00\x00", "not JSON"),
        (b'{"a":', "not JSON"),
        (b"5", "not an object but int"),
        (b"null", "not an object but NoneType"),
        (b'["a"]', "not an object but list"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_object_is_refused(line: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_row(line)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"a":"bad \\ud83d half"}', "bad \ufffd half"),
        (b'{"a":NaN}', 0.0),
        (b'{"a":-Infinity}', 0.0),
        (b'{"a":"\xff\xfe"}', "\ufffd\ufffd"),
        (b'{"a":"\\ud83d\\ude00"}', "\U0001f600"),
        (b' {"a": 1} \r\n', 1),
    ],
)
def test_what_other_writers_make_is_read(line: bytes, value: Any) -> None:
    assert decode_row(line) == {"a": value}


def test_tombstones_and_failures_begin_as_the_contract_says() -> None:
    tomb = json.loads(
        encode_tombstone(Tombstone(prompt_index=1, discarded="no_reasoning", prompt="p", task_key="k", sample=0))
    )
    assert list(tomb)[:5] == ["prompt_index", "discarded", "prompt", "task_key", "sample"]
    line = encode_failure(
        Failure(
            prompt_index=1,
            outcome="model_error",
            error=ErrorInfo(type="transient", message="bad \ud800", status=502),
            attempt=2,
            prompt="half \udc00",
            task_key="k",
            sample=0,
            usage=Usage(cost_usd=float("nan")),
        )
    )
    failure = json.loads(line.decode("utf-8"))
    assert list(failure)[:8] == [
        "prompt_index",
        "failed",
        "outcome",
        "error",
        "attempt",
        "prompt",
        "task_key",
        "sample",
    ]
    assert failure["failed"] is True
    assert failure["error"] == {"type": "transient", "message": "bad \ufffd", "status": 502}
    assert failure["prompt"] == "half \ufffd" and failure["usage"]["cost_usd"] == 0.0


def test_columns_hold_all_known_tools_and_no_other() -> None:
    stats, errors = tool_columns(("a", "b"), {"b": (3, 1, 2), "made_up": (1, 0, 1)})
    assert msgspec.to_builtins(stats) == {
        "a": {"count": 0, "success": 0, "failure": 0},
        "b": {"count": 3, "success": 1, "failure": 2},
    }
    assert errors == {"a": 0, "b": 2}


def test_turns_of_plain_objects() -> None:
    plain = {"from": "gpt", "value": "v", "tool_calls": [{"id": "i", "name": "n", "arguments": "{}"}]}
    (turn,) = turns_of([plain])
    assert isinstance(turn, Turn) and msgspec.to_builtins(turn) == plain
