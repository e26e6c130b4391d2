"""The Messages API: blocks, thinking, marks, usage, errors."""

from typing import Any

import pytest

from gristmill.config import ModelConfig
from gristmill.errors import ErrorKind, ModelError
from gristmill.model import anthropic, jsontext
from gristmill.model.anthropic import AnthropicDialect, claude
from gristmill.model.base import Request
from gristmill.model.select import dialect_name, probe, warnings_for
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, fail, say
from gristmill.types import Message, ToolCall, ToolSchema

TOOL = ToolSchema(name="terminal", description="Run.", parameters={"type": "object", "properties": {}})
SYSTEM, USER = Message(role="system", content="Be good."), Message(role="user", content="Go.")
BLOCKS = [
    {"type": "thinking", "thinking": "I look.", "signature": "sig=="},
    {"type": "redacted_thinking", "data": "secret"},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "id": "toolu_1", "name": "terminal", "input": {"command": "ls"}},
    {"type": "tool_use", "id": "toolu_2", "name": "terminal", "input": {}},
]


def answer(content: list[dict[str, Any]], stop: str = "tool_use", **usage: int) -> Turn:
    body = {
        "type": "message",
        "role": "assistant",
        "content": content,
        "stop_reason": stop,
        "usage": {"input_tokens": 10, "output_tokens": 5, **usage},
    }
    return fail(200, body)


def body(*messages: Message, tools: tuple[ToolSchema, ...] = (), **settings: Any) -> dict[str, Any]:
    dialect = AnthropicDialect(ModelConfig(**{"name": "claude-sonnet-4-6", **settings}))
    made: dict[str, Any] = jsontext.decode(dialect.encode(Request(messages=messages, tools=tools)))
    return made


async def ask(model_at: Any, turn: Turn, **settings: Any) -> Any:
    async with ScriptedEndpoint([turn]) as endpoint:
        model = model_at(endpoint.url, dialect="anthropic", name="claude-sonnet-4-6", **settings)
        return await model.complete(Request(messages=[SYSTEM, USER], tools=(TOOL,)))


async def test_blocks_are_taken_apart_and_go_back_intact(model_at: Any) -> None:
    reply = await ask(model_at, answer(BLOCKS))
    message = reply.message
    assert (message.content, message.reasoning, message.hidden_reasoning) == ("Let me look.", "I look.", False)
    assert [(c.id, c.name, c.arguments) for c in message.tool_calls] == [
        ("toolu_1", "terminal", '{"command":"ls"}'),
        ("toolu_2", "terminal", "{}"),
    ]
    results = [Message(role="tool", tool_call_id=f"toolu_{n}", content=f"r{n}") for n in (1, 2)]
    sent = body(SYSTEM, USER, message, *results)["messages"]
    assert sent[1] == {"role": "assistant", "content": BLOCKS}
    assert [(b["type"], b["tool_use_id"], b["content"]) for b in sent[2]["content"]] == [
        ("tool_result", "toolu_1", "r1"),
        ("tool_result", "toolu_2", "r2"),
    ]


async def test_calls_that_were_renumbered_keep_their_place(model_at: Any) -> None:
    message = (await ask(model_at, answer(BLOCKS))).message
    message.tool_calls = (ToolCall(id="a:1", name="terminal", arguments="not json"), message.tool_calls[1])
    sent = body(USER, message)["messages"][1]["content"]
    assert sent[:3] == BLOCKS[:3]
    assert sent[3] == {"type": "tool_use", "id": "a_1", "name": "terminal", "input": {"arguments": "not json"}}


async def test_only_encrypted_thinking_is_hidden_reasoning(model_at: Any) -> None:
    for block in ({"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "", "signature": "s"}):
        reply = await ask(model_at, answer([block, {"type": "text", "text": "a"}], "end_turn"))
        assert (reply.message.content, reply.message.reasoning, reply.message.hidden_reasoning) == ("a", "", True)


async def test_usage_counts_what_the_cache_held(model_at: Any) -> None:
    usage = {"cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    reply = await ask(model_at, answer([{"type": "text", "text": "a"}], "end_turn", **usage))
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens, reply.usage.completion_tokens) == (130, 100, 5)


@pytest.mark.parametrize(
    ("stop", "finish"),
    [("end_turn", "stop"), ("max_tokens", "length"), ("refusal", "content_filter"), ("pause_turn", "pause_turn")],
)
async def test_stop_reasons(model_at: Any, stop: str, finish: str) -> None:
    assert (await ask(model_at, answer([{"type": "text", "text": "a"}], stop))).finish == finish


async def test_a_full_window_is_a_context_overflow(model_at: Any) -> None:
    with pytest.raises(ModelError) as caught:
        await ask(model_at, answer([{"type": "text", "text": "a"}], "model_context_window_exceeded"))
    assert caught.value.kind is ErrorKind.CONTEXT


@pytest.mark.parametrize(
    "events",
    [
        ({"type": "message_start", "message": {"content": [], "usage": {}}},),
        (
            {"type": "message_start", "message": {"content": []}},
            {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        ),
        ({"type": "content_block_delta", "index": 3, "delta": {"text": "x"}},),
    ],
    ids=["cut", "error", "orphan"],
)
async def test_a_broken_stream_is_asked_again(model_at: Any, events: tuple[Any, ...]) -> None:
    reply = await ask(model_at, say("whole").after(Turn(events=events)), stream=True)
    assert (reply.message.content, len(reply.attempts)) == ("whole", 1)


async def test_a_cut_call_in_a_stream_keeps_its_text(model_at: Any) -> None:
    events = (
        {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3}}},
        {"type": "content_block_start", "index": 0, "content_block": {**BLOCKS[3], "input": {}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"comm'}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 9}},
    )
    reply = await ask(model_at, Turn(events=events), stream=True)
    assert (reply.finish, reply.message.tool_calls[0].arguments) == ("length", '{"comm')
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 9)


async def test_errors_are_those_of_the_table(model_at: Any) -> None:
    turn = fail(400, {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9"}})
    with pytest.raises(ModelError) as caught:
        await ask(model_at, turn)
    assert caught.value.kind is ErrorKind.CONTEXT


def test_marks_stand_at_the_system_text_and_at_the_end_of_this_and_the_last_request() -> None:
    called = Message(role="assistant", content="x", tool_calls=(ToolCall(id="1", name="terminal"),))
    result = Message(role="tool", tool_call_id="1", content="r")
    made = body(SYSTEM, USER, called, result, called, result, result)
    marked = [
        (turn["role"], place)
        for place, turn in enumerate(made["messages"])
        for block in turn["content"]
        if "cache_control" in block
    ]
    assert "cache_control" in made["system"][0]
    assert marked == [("user", 2), ("user", 4)]
    assert "cache_control" in made["messages"][4]["content"][1]


def test_images_become_image_blocks() -> None:
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]
    content = body(Message(role="user", content=parts))["messages"][0]["content"]
    assert content[1] == {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    assert content[2]["source"] == {"type": "url", "url": "https://example.org/a.png"}


def test_empty_texts_are_not_sent() -> None:
    messages = body(USER, Message(role="assistant"), Message(role="user", content="More."))["messages"]
    assert [(m["role"], len(m["content"])) for m in messages] == [("user", 2)]


@pytest.mark.parametrize(
    ("name", "settings", "thinking", "effort"),
    [
        ("claude-sonnet-4-6", {}, {"type": "adaptive", "display": "summarized"}, None),
        ("claude-opus-4-7", {"reasoning_effort": "xhigh"}, {"type": "adaptive", "display": "summarized"}, "xhigh"),
        ("claude-sonnet-4-6", {"reasoning_effort": "xhigh"}, {"type": "adaptive", "display": "summarized"}, "high"),
        ("claude-fable-5", {"reasoning_effort": "ultra"}, {"type": "adaptive", "display": "summarized"}, "max"),
        ("claude-opus-5", {"reasoning_effort": "minimal"}, {"type": "adaptive", "display": "summarized"}, "low"),
        ("claude-sonnet-4-6", {"reasoning_disabled": True, "reasoning_effort": "high"}, None, None),
        ("claude-sonnet-4-6", {"reasoning_effort": "none"}, None, None),
        ("claude-haiku-4-5-20251001", {"reasoning_effort": "low"}, {"type": "enabled", "budget_tokens": 2048}, None),
        ("claude-haiku-4-5", {"max_tokens": 4096}, {"type": "enabled", "budget_tokens": 3072}, None),
        ("claude-haiku-4-5", {"max_tokens": 1500}, None, None),
        ("claude-3-5-haiku-20241022", {"reasoning_effort": "high"}, None, None),
    ],
)
def test_thinking_is_asked_for_as_the_model_takes_it(
    name: str, settings: dict[str, Any], thinking: Any, effort: str | None
) -> None:
    made = body(USER, name=name, **settings)
    assert made.get("thinking") == thinking
    assert made.get("output_config", {}).get("effort") == effort
    if thinking and "budget_tokens" in thinking:
        assert thinking["budget_tokens"] < made["max_tokens"]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("claude-sonnet-4-6", (4, 6)),
        ("anthropic/claude-sonnet-4.6", (4, 6)),
        ("claude-opus-4-20250514", (4, 0)),
        ("claude-3-7-sonnet-20250219", (3, 7)),
        ("claude-3-haiku-20240307", (3, 0)),
        ("claude-haiku-4-5-20251001", (4, 5)),
        ("claude-mythos-preview", (99, 0)),
    ],
)
def test_versions_are_read_from_names(name: str, version: tuple[int, int]) -> None:
    assert claude(name).version == version


async def test_the_key_goes_into_its_own_header(model_at: Any) -> None:
    async with ScriptedEndpoint([say("x")], api_key="k-123") as endpoint:
        base = endpoint.url.removesuffix("/v1")
        model = model_at(base, dialect="anthropic", api_key="k-123", name="claude-opus-5")
        await model.complete(Request(messages=[USER]))
        seen = endpoint.requests[0]
        assert (seen.path, seen.headers["x-api-key"]) == ("/v1/messages", "k-123")
        assert seen.headers["anthropic-version"] == anthropic.VERSION
        config = ModelConfig(base_url=base, dialect="anthropic", api_key="k-123", name="claude-opus-5")
        assert await probe(config) == []


def test_the_own_host_is_spoken_to_natively_with_the_key_in_one_header_only() -> None:
    config = ModelConfig(base_url="https://api.anthropic.com", name="claude-opus-5", api_key="k")
    assert dialect_name(config) == "anthropic"
    assert "Authorization" not in AnthropicDialect(config).headers()


def test_flags_without_effect_are_named() -> None:
    config = ModelConfig(
        base_url="https://api.anthropic.com/v1",
        name="claude-sonnet-4-6",
        reasoning_effort="xhigh",
        providers_order=("a",),
        record_tokens=True,
    )
    effort, routing, tokens = warnings_for(config)
    assert "high is sent instead" in effort
    assert "only OpenRouter" in routing
    assert "--record_tokens" in tokens


async def test_parallel_calls_stream_into_separate_inputs(model_at: Any) -> None:
    turn = Turn(calls=(("terminal", {"command": "a" * 50}), ("terminal", {"command": "b" * 50})), text="Both.")
    reply = await ask(model_at, turn, stream=True)
    assert [c.arguments for c in reply.message.tool_calls] == [
        '{"command":"' + "a" * 50 + '"}',
        '{"command":"' + "b" * 50 + '"}',
    ]
    assert reply.message.content == "Both."


async def test_a_plain_call_needs_no_blocks(model_at: Any) -> None:
    reply = await ask(model_at, call("terminal", {}))
    assert reply.message.reasoning == ""
    assert reply.usage.completion_tokens > 0
