"""Bug cases of model responses, at the border where they arrive: real HTTP, real streams."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from gristmill.config import ModelConfig
from gristmill.errors import ErrorKind, ModelError
from gristmill.model.base import Reply, Request
from gristmill.model.client import EndpointModel
from gristmill.model.retry import Backoff
from gristmill.model.select import make_model
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, fail, say
from gristmill.types import Message, ToolSchema

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
TERMINAL = ToolSchema(
    name="terminal",
    description="Run a command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
HELLO = Request(messages=[Message(role="user", content="hello")], tools=(TERMINAL,))

Opener = Callable[..., EndpointModel]


@pytest.fixture
async def model_at() -> AsyncIterator[Opener]:
    """`model_at(url, stream=True, …)`: a model with short waits, closed at the end."""
    opened: list[EndpointModel] = []

    def open_model(url: str, **settings: Any) -> EndpointModel:
        model = make_model(
            ModelConfig(**{"name": "scripted", "base_url": url, **settings}), backoff=Backoff(retries=3, first=0.01)
        )
        opened.append(model)
        return model

    yield open_model
    for model in opened:
        await model.close()


def message(content: Any, *, finish: str = "stop", **fields: Any) -> Turn:
    body = {
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content, **fields}, "finish_reason": finish}
        ],
        "usage": USAGE,
    }
    return fail(200, body)


async def reply_to(model_at: Opener, turn: Turn, **settings: Any) -> Reply:
    async with ScriptedEndpoint([turn]) as endpoint:
        return await model_at(endpoint.url, **settings).complete(HELLO)


async def test_mr_14_content_is_a_list_of_parts(model_at: Opener) -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "2+2"}]},
        {"type": "text", "text": "The answer"},
        {"type": "thinking", "thinking": []},
        {"type": "text", "text": " is 4."},
    ]
    reply = await reply_to(model_at, message(parts))
    assert (reply.message.content, reply.message.reasoning) == ("The answer is 4.", "2+2")
    assert reply.message.extra["content"] == parts


async def test_mr_15_closing_think_tag_without_an_opening_one(model_at: Opener) -> None:
    reply = await reply_to(model_at, message("internal notes\n</think>\nFinal answer: 4"))
    assert (reply.message.content, reply.message.reasoning) == ("Final answer: 4", "internal notes")


async def test_mr_16_opening_think_tag_never_closed(model_at: Opener) -> None:
    reply = await reply_to(model_at, message("<think>step 1, step 2, step", finish="length"))
    assert (reply.message.content, reply.message.reasoning) == ("", "step 1, step 2, step")
    assert reply.finish == "length"


async def test_mr_17_literal_think_tags_inside_reasoning_or_answer(model_at: Opener) -> None:
    text = "Use `<think>draft</think>` as an example."
    thought = "The user asks about </think> tags; I explain <think>."
    reply = await reply_to(model_at, message(text, reasoning=thought))
    assert (reply.message.content, reply.message.reasoning) == (text, thought)


async def test_mr_18_think_tag_split_over_stream_chunks(model_at: Opener) -> None:
    text = "<think>R1</think>V1 <reasoning>R2</reasoning> V2"
    end: list[Any] = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, "[DONE]"]

    def cut_at(request: dict[str, Any], headers: Any) -> Turn:
        first, second = (int(place) for place in request["messages"][0]["content"].split())
        pieces = (text[:first], text[first:second], text[second:])
        return Turn(events=(*({"choices": [{"index": 0, "delta": {"content": p}}]} for p in pieces), *end))

    async with ScriptedEndpoint(cut_at) as endpoint:
        model = model_at(endpoint.url, stream=True)
        for first in range(len(text)):
            asked = Message(role="user", content=f"{first} {min(first + 7, len(text))}")
            reply = await model.complete(Request(messages=[asked]))
            assert reply.message.reasoning == "R1"
            assert reply.message.content == "V1 <reasoning>R2</reasoning> V2"


@pytest.mark.parametrize(
    ("fields", "reasoning", "hidden"),
    [
        ({"reasoning": "R"}, "R", False),
        ({"reasoning_content": "R"}, "R", False),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "R"}]}, "R", False),
        (
            {
                "reasoning": "R",
                "reasoning_content": "R",
                "reasoning_details": [{"type": "reasoning.text", "text": "R"}],
            },
            "R",
            False,
        ),
        ({"reasoning": None, "reasoning_content": "R"}, "R", False),
        ({"reasoning": "", "reasoning_details": [{"type": "reasoning.encrypted", "data": "xxxx"}]}, "", True),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_mr_19_reasoning_under_different_field_names(
    model_at: Opener, stream: bool, fields: dict[str, Any], reasoning: str, hidden: bool
) -> None:
    reply = await reply_to(model_at, Turn(text="a", message=fields), stream=stream)
    assert (reply.message.content, reply.message.reasoning, reply.message.hidden_reasoning) == ("a", reasoning, hidden)


async def test_mr_21_reasoning_must_be_sent_back(model_at: Opener) -> None:
    def script(request: dict[str, Any], headers: Mapping[str, str]) -> Any:
        if len(request["messages"]) > 1 and "reasoning_content" not in request["messages"][-2]:
            return fail(400, {"error": {"message": "reasoning_content must be passed back"}})
        return [call("terminal", {"command": "echo hi"}, reasoning="R", reasoning_field="reasoning"), say("done")]

    async with ScriptedEndpoint(script) as endpoint:
        model = model_at(endpoint.url)
        first = await model.complete(HELLO)
        result = Message(role="tool", tool_call_id=first.message.tool_calls[0].id, content="hi")
        history = [*HELLO.messages, first.message, result]
        assert (await model.complete(Request(messages=history))).message.content == "done"
        sent = endpoint.requests[-1].body["messages"][1]
        assert (sent["reasoning"], sent["reasoning_content"]) == ("R", "R")
        # Where it is lost all the same, the row ends at once and says why.
        without = Message(role="assistant", tool_calls=first.message.tool_calls)
        with pytest.raises(ModelError, match="must be passed back") as caught:
            await model.complete(Request(messages=[*HELLO.messages, without, result]))
    assert caught.value.kind is ErrorKind.PERMANENT
    assert len(caught.value.attempts) == 1


def tool_piece(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": list(pieces)}, "finish_reason": None}]}


T1, T2 = {"name": "t1", "arguments": '{"x":1}'}, {"name": "t2", "arguments": '{"y":2}'}
STREAMS = {
    "no_index": [tool_piece({"id": "a", "function": T1}), tool_piece({"id": "b", "function": T2})],
    "all_zero": [
        tool_piece({"index": 0, "id": "a", "function": T1}),
        tool_piece({"index": 0, "id": "b", "function": T2}),
    ],
    "drift": [
        tool_piece({"index": 0, "id": "a", "function": {"name": "t1", "arguments": '{"x"'}}),
        tool_piece({"index": 1, "function": {"arguments": ":1}"}}),
    ],
    "dup_first": [
        tool_piece(
            {"index": 0, "id": "a", "function": {"name": "t1", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"x"'}},
        ),
        tool_piece({"index": 0, "function": {"arguments": ":1}"}}),
    ],
    "null_args": [
        tool_piece({"index": 0, "id": "a", "function": {"name": "t1", "arguments": None}}),
        tool_piece({"index": 0, "function": {"arguments": '{"x":1}'}}),
    ],
}


@pytest.mark.parametrize("variant", STREAMS)
async def test_mr_26_stream_deltas_with_missing_equal_null_or_drifting_index(model_at: Opener, variant: str) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    reply = await reply_to(model_at, Turn(events=(*STREAMS[variant], end, "[DONE]")), stream=True)
    expected = [("t1", '{"x":1}'), ("t2", '{"y":2}')][: 2 if variant in ("no_index", "all_zero") else 1]
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == expected


CALL_TEXT = '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo hi"}}\n</tool_call>'


async def test_mr_28_tool_call_arrives_as_text_in_content(model_at: Opener) -> None:
    reply = await reply_to(model_at, message(CALL_TEXT))
    assert reply.message.tool_calls == ()
    assert (reply.message.content, reply.suspect) == (CALL_TEXT, "call_like_text")
    mention = await reply_to(model_at, message("Models write <tool_call> blocks."))
    assert mention.suspect == ""


async def test_mr_29_http_200_with_an_error_object(model_at: Opener) -> None:
    inner = {"message": "Rate limited", "code": 429, "metadata": {"headers": {"Retry-After": "0.05"}}}
    turn = say("done").after(
        fail(200, {"error": {"message": "Provider returned error", "code": 502}}), fail(200, {"error": inner})
    )
    reply = await reply_to(model_at, turn)
    assert reply.message.content == "done"
    assert [attempt.status for attempt in reply.attempts] == [502, 429]
    assert reply.attempts[1].waited >= 0.05


@pytest.mark.parametrize(("code", "kind"), [(401, "auth"), (402, "credit"), (400, "permanent")])
async def test_mr_29_a_permanent_inner_error_is_not_retried(model_at: Opener, code: int, kind: str) -> None:
    with pytest.raises(ModelError) as caught:
        await reply_to(model_at, fail(200, {"error": {"message": "no", "code": code}}))
    assert (caught.value.kind, len(caught.value.attempts)) == (kind, 1)


async def test_mr_30_http_200_whose_content_is_the_routers_error_text(model_at: Opener) -> None:
    shim = Turn(text="Connect timeout, please try again later.", usage=(0, 0))
    reply = await reply_to(model_at, say("done").after(shim))
    assert (reply.message.content, len(reply.attempts)) == ("done", 1)
    unknown = await reply_to(model_at, Turn(text="Something odd.", usage=(0, 0)))
    assert unknown.suspect == "zero_completion_tokens"


async def test_mr_32_html_body_instead_of_json(model_at: Opener) -> None:
    page = "<!DOCTYPE html><html><body><pre>Internal Server Error</pre></body></html>"
    turn = say("done").after(fail(500, page), fail(200, "<html>captive portal</html>"))
    reply = await reply_to(model_at, turn)
    assert reply.message.content == "done"
    assert [attempt.kind for attempt in reply.attempts] == ["transient", "malformed"]
    with pytest.raises(ModelError, match="captive portal") as caught:
        await reply_to(model_at, fail(200, "<html>captive portal</html>"))
    assert len(caught.value.attempts) == 4


FIRST_HALF = {"choices": [{"index": 0, "delta": {"content": "The first half of"}}]}


@pytest.mark.parametrize(
    "events",
    [
        (FIRST_HALF,),
        (FIRST_HALF, "[DONE]"),
        (tool_piece({"index": 0, "id": "a", "function": {"name": "t1", "arguments": '{"x'}}),),
        (FIRST_HALF, {"error": {"message": "upstream died", "code": 502}}),
    ],
    ids=["end", "done", "arguments", "error"],
)
async def test_mr_33_stream_ends_without_finish_reason(model_at: Opener, events: tuple[Any, ...]) -> None:
    reply = await reply_to(model_at, say("whole").after(Turn(events=events)), stream=True)
    assert (reply.message.content, len(reply.attempts)) == ("whole", 1)
    with pytest.raises(ModelError):
        await reply_to(model_at, Turn(events=events), stream=True)


async def test_mr_34_provider_says_the_function_call_was_malformed(model_at: Opener) -> None:
    reply = await reply_to(model_at, message("", finish="MALFORMED_FUNCTION_CALL"))
    assert (reply.finish, reply.message.content, reply.message.tool_calls) == ("MALFORMED_FUNCTION_CALL", "", ())


async def test_co_03_context_length_exceeded_in_the_middle_of_a_row(model_at: Opener) -> None:
    body = {"error": {"message": "maximum context length is 8192 tokens", "code": "context_length_exceeded"}}
    with pytest.raises(ModelError) as caught:
        await reply_to(model_at, fail(400, body))
    assert (caught.value.kind, len(caught.value.attempts)) == (ErrorKind.CONTEXT, 1)
    with pytest.raises(ModelError) as other:
        await reply_to(model_at, fail(400, {"error": {"message": "messages: field required"}}))
    assert other.value.kind is ErrorKind.PERMANENT


async def test_co_04_misleading_status_codes(model_at: Opener) -> None:
    failures = (
        fail(413, {"error": {"message": "Payload Too Large"}}),
        fail(529, {"error": {"type": "overloaded_error"}}),
        fail(503, "<html>busy</html>"),
    )
    reply = await reply_to(model_at, say("done").after(*failures))
    assert [attempt.status for attempt in reply.attempts] == [413, 529, 503]
    with pytest.raises(ModelError) as caught:
        await reply_to(model_at, failures[2])
    assert "503" in caught.value.message
    assert "<html>busy</html>" in caught.value.message
