"""Models against a real server: faults, timeouts, keys, streams."""

import asyncio
import time
from typing import Any

import pytest

from gristmill.errors import ErrorKind, ModelError
from gristmill.model.base import Request
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, calls, fail, say
from gristmill.types import Message, ToolSchema

HELLO = Request(messages=[Message(role="user", content="hello")])
TOOL = ToolSchema(name="terminal", description="Run a command.", parameters={"type": "object", "properties": {}})
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


async def failure(model: Any, request: Request = HELLO) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await model.complete(request)
    return caught.value


@STREAMS
async def test_an_answer_with_calls_and_reasoning(model_at: Any, stream: bool) -> None:
    turn = calls(
        ("terminal", {"command": "ls ä😀"}), ("read_file", {"path": "a"}), reasoning="think " * 20, usage=(7, 3)
    )
    async with ScriptedEndpoint([turn]) as endpoint:
        reply = await model_at(endpoint.url, stream=stream).complete(HELLO)
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [
        ("terminal", '{"command":"ls ä😀"}'),
        ("read_file", '{"path":"a"}'),
    ]
    assert reply.message.reasoning == "think " * 20
    assert reply.finish == "tool_calls"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 3)
    assert reply.seconds > 0


@STREAMS
@pytest.mark.parametrize(
    "fault",
    [
        Turn(fault="reset"),
        Turn(text="half of it" * 20, fault="cut"),
        fail(500, "<html>no</html>"),
        fail(200, ""),
        fail(200, "<html>captive portal</html>"),
        fail(200, b"\xff\xfe\x00"),
        fail(200, "[]"),
        fail(200, {"choices": []}),
        fail(200, {"choices": None}),
        fail(200, {"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]}),
        fail(200, {"error": {"code": 502, "message": "Provider returned error"}}),
        fail(429, "slow down", headers={"Retry-After": "0"}),
    ],
    ids=lambda turn: turn.fault or f"{turn.status}-{str(turn.body)[:20]}",
)
async def test_a_fault_that_may_pass_is_tried_again(model_at: Any, stream: bool, fault: Turn) -> None:
    async with ScriptedEndpoint([say("done").after(fault)]) as endpoint:
        reply = await model_at(endpoint.url, stream=stream).complete(HELLO)
    assert reply.message.content == "done"
    assert len(reply.attempts) == 1
    assert ErrorKind(reply.attempts[0].kind).retryable


@STREAMS
@pytest.mark.parametrize(("status", "kind"), [(401, "auth"), (404, "not_found"), (402, "credit"), (400, "permanent")])
async def test_a_permanent_fault_is_asked_once(model_at: Any, stream: bool, status: int, kind: str) -> None:
    async with ScriptedEndpoint([fail(status, {"error": {"message": "no"}})]) as endpoint:
        error = await failure(model_at(endpoint.url, stream=stream))
        assert endpoint.count == 1
    assert error.kind == kind


async def test_a_refused_connection_says_where(model_at: Any) -> None:
    async with ScriptedEndpoint([say("x")]) as endpoint:
        url = endpoint.url
    error = await failure(model_at(url, max_retries=1))
    assert error.kind is ErrorKind.TRANSIENT
    assert "cannot connect to 127.0.0.1" in error.message
    assert len(error.attempts) == 2


@STREAMS
async def test_a_silent_server_is_left_in_time(model_at: Any, stream: bool) -> None:
    async with ScriptedEndpoint([Turn(fault="silent")]) as endpoint:
        begun = time.monotonic()
        error = await failure(model_at(endpoint.url, stream=stream, request_timeout=0.2, max_retries=0))
    assert time.monotonic() - begun < 3
    assert error.kind is ErrorKind.TRANSIENT


@STREAMS
async def test_a_server_that_drips_bytes_is_left_in_time(model_at: Any, stream: bool) -> None:
    async with ScriptedEndpoint([say("x" * 500, drip=0.05)]) as endpoint:
        begun = time.monotonic()
        error = await failure(model_at(endpoint.url, stream=stream, request_timeout=0.3, max_retries=0))
    assert time.monotonic() - begun < 3
    assert error.kind is ErrorKind.TRANSIENT


async def test_a_slow_stream_arrives_whole(model_at: Any) -> None:
    async with ScriptedEndpoint([call("terminal", {"command": "é"}, drip=0.0005)]) as endpoint:
        reply = await model_at(endpoint.url, stream=True).complete(HELLO)
    assert reply.message.tool_calls[0].arguments == '{"command":"é"}'


async def test_a_server_that_does_not_stream_is_understood(model_at: Any) -> None:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}]}
    async with ScriptedEndpoint([fail(200, body)]) as endpoint:
        reply = await model_at(endpoint.url, stream=True).complete(HELLO)
    assert reply.message.content == "whole"


async def test_a_redirect_is_not_followed_with_the_key(model_at: Any) -> None:
    async with (
        ScriptedEndpoint([say("stolen")]) as other,
        ScriptedEndpoint([fail(307, "", headers={"Location": other.url + "/chat/completions"})]) as endpoint,
    ):
        error = await failure(model_at(endpoint.url, api_key="sk-secret"))
        assert other.count == 0
        assert endpoint.requests[0].headers["Authorization"] == "Bearer sk-secret"
    assert error.kind is ErrorKind.NOT_FOUND
    assert other.url in error.mend


@STREAMS
async def test_the_key_is_in_no_error(model_at: Any, stream: bool) -> None:
    body = {"error": {"message": "Incorrect API key provided: sk-secret", "code": 401}}
    async with ScriptedEndpoint([fail(200, body)]) as endpoint:
        error = await failure(model_at(endpoint.url, api_key="sk-secret", stream=stream))
    assert "sk-secret" not in f"{error} {error.args} {error.attempts}"


async def test_cancelling_leaves_the_pool_usable(model_at: Any) -> None:
    slow = {"slow": [say("late", latency=30)], "": [say("quick")]}
    async with ScriptedEndpoint(slow) as endpoint:
        model = model_at(endpoint.url)
        waiting = [
            asyncio.create_task(model.complete(Request(messages=[Message(role="user", content="slow")])))
            for _ in range(6)
        ]
        while endpoint.in_flight < 6:
            await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert (await model.complete(HELLO)).message.content == "quick"
        for _ in range(200):
            if not endpoint.in_flight:
                break
            await asyncio.sleep(0.01)
        assert endpoint.in_flight == 0


async def test_many_sessions_at_once_get_their_own_answers(model_at: Any) -> None:
    def echo(request: dict[str, Any], headers: Any) -> Turn:
        return say(request["messages"][-1]["content"])

    async with ScriptedEndpoint(echo, latency=0.05) as endpoint:
        model = model_at(endpoint.url)
        asked = [Request(messages=[Message(role="user", content=f"n{i}")]) for i in range(200)]
        replies = await asyncio.gather(*(model.complete(request) for request in asked))
        assert [r.message.content for r in replies] == [f"n{i}" for i in range(200)]
        assert endpoint.most_in_flight > 20  # fewer than asked, on a busy machine


@STREAMS
async def test_lone_surrogates_become_replacement_characters(model_at: Any, stream: bool) -> None:
    body = (
        rb'{"choices":[{"index":0,"delta":{"content":"a\ud83d b"},"message":{"role":"assistant","content":"a\ud83d b"},'
        rb'"finish_reason":"stop"}]}'
    )
    turn = Turn(events=(body.decode(),)) if stream else fail(200, body)
    async with ScriptedEndpoint([turn]) as endpoint:
        model = model_at(endpoint.url, stream=stream)
        reply = await model.complete(Request(messages=[Message(role="user", content="also \udc80 here")]))
        assert endpoint.requests[0].body["messages"][0]["content"] == "also \ufffd here"
    assert reply.message.content == "a\ufffd b"


async def test_the_request_carries_tools_and_limits(model_at: Any) -> None:
    async with ScriptedEndpoint([say("x")]) as endpoint:
        model = model_at(endpoint.url, max_tokens=50)
        await model.complete(Request(messages=HELLO.messages, tools=(TOOL,)))
        await model.complete(Request(messages=HELLO.messages, tools=(TOOL,), max_tokens=100))
        first, second = (seen.body for seen in endpoint.requests)
    assert first["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "terminal",
                "description": "Run a command.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
    assert (first["max_tokens"], second["max_tokens"]) == (50, 100)
    assert (first["model"], first["messages"]) == ("scripted", [{"role": "user", "content": "hello"}])


async def test_earlier_turns_go_back_as_they_came(model_at: Any) -> None:
    details = [{"type": "reasoning.text", "text": "R", "signature": "s"}, {"type": "reasoning.encrypted", "data": "e"}]
    first = call("terminal", {"command": "ls"}, message={"reasoning_details": details})
    async with ScriptedEndpoint([first, say("done")]) as endpoint:
        model = model_at(endpoint.url)
        reply = await model.complete(HELLO)
        result = Message(role="tool", tool_call_id=reply.message.tool_calls[0].id, name="terminal", content="out")
        await model.complete(Request(messages=[*HELLO.messages, reply.message, result]))
        sent = endpoint.requests[1].body["messages"]
    assert sent[1]["reasoning_details"] == details
    assert sent[1]["tool_calls"][0]["function"] == {"name": "terminal", "arguments": '{"command":"ls"}'}
    assert sent[2] == {"role": "tool", "tool_call_id": sent[1]["tool_calls"][0]["id"], "content": "out"}


async def test_signatures_beside_a_call_go_back(model_at: Any) -> None:
    made = {
        "id": "c",
        "type": "function",
        "function": {"name": "terminal", "arguments": "{}"},
        "extra_content": {"google": {"thought_signature": "s"}},
    }
    async with ScriptedEndpoint([Turn(message={"tool_calls": [made]}, finish="tool_calls"), say("done")]) as endpoint:
        model = model_at(endpoint.url)
        reply = await model.complete(HELLO)
        await model.complete(Request(messages=[*HELLO.messages, reply.message]))
        assert endpoint.requests[1].body["messages"][1]["tool_calls"] == [made]


async def test_reported_cost_and_token_details_are_read(model_at: Any) -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 60},
        "completion_tokens_details": {"reasoning_tokens": 12},
        "cost": 0.01,
        "is_byok": True,
        "cost_details": {"upstream_inference_cost": 0.2},
    }
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage, "provider": "P"}
    async with ScriptedEndpoint([fail(200, body)]) as endpoint:
        reply = await model_at(endpoint.url).complete(HELLO)
    assert (reply.usage.cached_tokens, reply.usage.reasoning_tokens) == (60, 12)
    assert reply.usage.cost_usd == pytest.approx(0.21)
    assert reply.usage.cost_known
    assert reply.raw["provider"] == "P"
    assert reply.message.hidden_reasoning  # 12 tokens of reasoning that nobody may read


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, "x", {"prompt_tokens": "7"}])
async def test_missing_usage_is_zero_and_its_cost_unknown(model_at: Any, usage: Any) -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage}
    async with ScriptedEndpoint([fail(200, body)]) as endpoint:
        reply = await model_at(endpoint.url).complete(HELLO)
    assert reply.usage.total_tokens == 0
    assert not reply.usage.cost_known


async def test_a_refusal_is_a_content_filter(model_at: Any) -> None:
    body = {"choices": [{"message": {"content": None, "refusal": "I will not."}, "finish_reason": "stop"}]}
    async with ScriptedEndpoint([fail(200, body)]) as endpoint:
        reply = await model_at(endpoint.url).complete(HELLO)
    assert (reply.message.content, reply.finish) == ("I will not.", "content_filter")
