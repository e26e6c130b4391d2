"""The same conversation through every dialect gives the same messages."""

import json
from typing import Any

import msgspec
import pytest

from gristmill.model.base import Request
from gristmill.testing.endpoint import ScriptedEndpoint
from gristmill.types import Message, ToolSchema
from support.dialects import DIALECTS, TURNS

TOOLS = tuple(
    ToolSchema(
        name=name,
        description=f"The tool {name}.",
        parameters={"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
    )
    for name, argument in (("terminal", "command"), ("read_file", "path"))
)


async def converse(model: Any) -> list[Message]:
    """What a session does: answers and results in turn, its own call ids."""
    messages = [Message(role="system", content="Be good."), Message(role="user", content="Go.")]
    for _ in TURNS:
        reply = await model.complete(Request(messages=messages, tools=TOOLS))
        assert reply.finish == ("tool_calls" if reply.message.tool_calls else "stop")
        assert reply.suspect == ""
        calls = tuple(
            msgspec.structs.replace(made, id=f"call_{len(messages)}_{n}")
            for n, made in enumerate(reply.message.tool_calls)
        )
        messages.append(msgspec.structs.replace(reply.message, tool_calls=calls))
        messages += [
            Message(role="tool", tool_call_id=made.id, name=made.name, content='{"output": "done"}') for made in calls
        ]
    return messages


def essence(messages: list[Message]) -> list[tuple[Any, ...]]:
    return [
        (m.role, m.content, m.reasoning, [(c.id, c.name, json.loads(c.arguments)) for c in m.tool_calls])
        for m in messages
    ]


@pytest.mark.parametrize("name", DIALECTS)
async def test_the_same_conversation_gives_the_same_messages(model_at: Any, name: str) -> None:
    settings, turns = DIALECTS[name]
    async with ScriptedEndpoint(turns) as endpoint:
        messages = await converse(model_at(endpoint.url, **settings))
        last = endpoint.requests[-1].body
    answers = [m for m in messages if m.role == "assistant"]
    assert [(m.reasoning, m.content) for m in answers] == [(turn.reasoning, turn.text) for turn in TURNS]
    assert [[(c.name, json.loads(c.arguments)) for c in m.tool_calls] for m in answers] == [
        list(turn.calls) for turn in TURNS
    ]
    async with ScriptedEndpoint(TURNS) as endpoint:
        assert essence(messages) == essence(await converse(model_at(endpoint.url, dialect="chat")))
    # What the model thought before is there for it to read again.
    sent = json.dumps(last, ensure_ascii=False)
    assert all(turn.reasoning.split("\n")[0] in sent for turn in TURNS[:-1])


async def test_each_dialect_asks_in_its_own_shape(model_at: Any) -> None:
    shapes = {}
    for name in ("chat", "anthropic", "hermes", "json"):
        settings, turns = DIALECTS[name]
        async with ScriptedEndpoint(turns) as endpoint:
            await converse(model_at(endpoint.url, **settings))
            seen = endpoint.requests[1]
            shapes[name] = (seen.path, "tools" in seen.body, [m["role"] for m in seen.body["messages"]])
    assert shapes == {
        "chat": ("/v1/chat/completions", True, ["system", "user", "assistant", "tool"]),
        "anthropic": ("/v1/messages", True, ["user", "assistant", "user"]),
        "hermes": ("/v1/chat/completions", False, ["system", "user", "assistant", "user"]),
        "json": ("/v1/chat/completions", False, ["system", "user", "assistant", "user"]),
    }
