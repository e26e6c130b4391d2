"""Streams put together again."""

from typing import Any

import pytest

from gristmill.errors import ErrorKind, ModelError
from gristmill.model.deltas import ChatCollector


def collect(*deltas: dict[str, Any], finish: str | None = "stop") -> dict[str, Any]:
    collector = ChatCollector()
    for delta in deltas:
        collector.feed({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    collector.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return collector.answer()


def piece(name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    return {"tool_calls": [{**more, "function": function}]}


def calls(*deltas: dict[str, Any]) -> list[tuple[str, str]]:
    made = collect(*deltas)["choices"][0]["message"]["tool_calls"]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in made]


def test_text_and_reasoning_are_joined() -> None:
    message = collect({"reasoning": "a"}, {"reasoning": "b", "content": "x"}, {"content": "y"})["choices"][0]["message"]
    assert message == {"role": "assistant", "reasoning": "ab", "content": "xy"}


def test_interleaved_calls_follow_their_index() -> None:
    assert calls(
        piece("t1", "", index=0, id="a"),
        piece("t2", "", index=1, id="b"),
        piece(None, '{"x":', index=0),
        piece(None, '{"y":', index=1),
        piece(None, "1}", index=0),
        piece(None, "2}", index=1),
    ) == [("t1", '{"x":1}'), ("t2", '{"y":2}')]


def test_a_provider_that_repeats_id_and_name_in_every_piece() -> None:
    assert calls(piece("t1", '{"x"', index=0, id="a"), piece("t1", ":1}", index=0, id="a")) == [("t1", '{"x":1}')]


def test_a_name_without_an_id_repeated_is_no_second_call() -> None:
    assert calls(piece("t1", '{"x"', index=0), piece("t1", ":1}", index=0)) == [("t1", '{"x":1}')]


def test_two_whole_calls_to_the_same_tool_without_ids_stay_two() -> None:
    assert calls(piece("t1", '{"x":1}', index=0), piece("t1", '{"x":2}', index=0)) == [
        ("t1", '{"x":1}'),
        ("t1", '{"x":2}'),
    ]


def test_an_id_before_its_name() -> None:
    assert calls(piece(None, None, index=0, id="a"), piece("t1", "{}", index=0)) == [("t1", "{}")]


def test_names_are_never_joined() -> None:
    assert [name for name, _ in calls(piece("term", "", index=0, id="a"), piece("inal", "{}", index=0))] == [
        "term",
        "inal",
    ]


def test_arguments_that_are_an_object() -> None:
    assert calls(piece("t1", {"x": 1}, index=0)) == [("t1", '{"x":1}')]


def test_other_fields_of_a_call_are_kept() -> None:
    extra = {"google": {"thought_signature": "s"}}
    made = collect(piece("t1", "{}", index=0, extra_content=extra))["choices"][0]["message"]["tool_calls"]
    assert made[0]["extra_content"] == extra


def test_reasoning_details_are_joined_and_keep_their_signature() -> None:
    details = [
        {"reasoning_details": [{"type": "reasoning.text", "text": "a", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "b", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.text", "signature": "s", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "e", "index": 1}]},
    ]
    message = collect(*details)["choices"][0]["message"]
    assert message["reasoning_details"] == [
        {"type": "reasoning.text", "text": "ab", "index": 0, "signature": "s"},
        {"type": "reasoning.encrypted", "data": "e", "index": 1},
    ]


def test_content_parts_are_joined() -> None:
    message = collect(
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "b"}]}]},
        {"content": "x"},
        {"content": "y"},
    )["choices"][0]["message"]
    assert message["content"] == [
        {"type": "thinking", "thinking": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"type": "text", "text": "xy"},
    ]


def test_usage_after_the_last_choice_is_kept() -> None:
    collector = ChatCollector()
    collector.feed({"id": "1", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]})
    collector.feed({"choices": [], "usage": {"completion_tokens": 3}})
    collector.feed({"id": "1", "choices": None, "usage": None})
    assert collector.answer()["usage"] == {"completion_tokens": 3}


@pytest.mark.parametrize(
    "deltas", [[{"content": "half"}], [], [piece("t1", '{"x"', index=0)]], ids=["text", "nothing", "arguments"]
)
def test_a_stream_without_a_finish_reason_is_no_answer(deltas: list[dict[str, Any]]) -> None:
    with pytest.raises(ModelError) as caught:
        collect(*deltas, finish=None)
    assert caught.value.kind is ErrorKind.MALFORMED


def test_arguments_without_a_call_are_refused() -> None:
    with pytest.raises(ModelError) as caught:
        collect(piece(None, '{"x":1}', index=0))
    assert caught.value.kind is ErrorKind.MALFORMED


def test_an_error_event_ends_the_stream() -> None:
    collector = ChatCollector()
    collector.feed({"choices": [{"index": 0, "delta": {"content": "x"}}]})
    with pytest.raises(ModelError) as caught:
        collector.feed({"error": {"message": "Overloaded", "code": 503}})
    assert (caught.value.kind, caught.value.status) == (ErrorKind.TRANSIENT, 503)
