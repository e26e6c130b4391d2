"""The json dialect: answers constrained by a schema."""

from typing import Any

import jsonschema_rs
import pytest

from gristmill.config import ModelConfig
from gristmill.model import jsontext
from gristmill.model.base import Request
from gristmill.model.chat import ChatDialect
from gristmill.model.json_schema import RESULT_LENGTH, JsonDialect
from gristmill.testing.endpoint import ScriptedEndpoint, say
from gristmill.types import Message, ToolCall, ToolSchema

TERMINAL = ToolSchema(
    name="terminal",
    description="Run a command. It has a shell.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "x"}, "timeout": {"type": "integer"}},
        "required": ["command"],
    },
)
TAKEN = ToolSchema(
    name="odd", description="Odd.", parameters={"type": "object", "properties": {"tool": {"type": "string"}}}
)
USER = Message(role="user", content="List the files.")
CALLED = Message(
    role="assistant",
    reasoning="I look.",
    tool_calls=(ToolCall(id="1", name="terminal", arguments='{"command":"ls"}'),),
)
RESULT = Message(role="tool", tool_call_id="1", content='{"output":"a.txt\\n","exit_code":0,"error":null}')


def body(*messages: Message, compact: bool = False, tools: tuple[ToolSchema, ...] = (TERMINAL,)) -> dict[str, Any]:
    dialect = JsonDialect(ChatDialect(ModelConfig(name="m")), compact=compact)
    made: dict[str, Any] = jsontext.decode(dialect.encode(Request(messages=messages, tools=tools)))
    return made


def schema(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["response_format"]["json_schema"]["schema"]
    return found


def forms(made: dict[str, Any]) -> list[str]:
    whole = schema(made)
    return [form["properties"]["tool"]["const"] for form in whole.get("oneOf", [whole])]


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ({"thought": "t", "tool": "terminal", "command": "ls"}, True),
        ({"thought": "t", "tool": "terminal", "command": "ls", "timeout": 3}, True),
        ({"thought": "t", "tool": "final", "answer": "a"}, True),
        ({"thought": "t", "tool": "terminal"}, False),
        ({"thought": "t", "tool": "nope", "command": "ls"}, False),
        ({"thought": "t", "tool": "terminal", "command": "ls", "more": 1}, False),
        ({"tool": "final", "answer": "a"}, False),
    ],
)
def test_the_schema_lets_in_one_call_or_a_final_answer(answer: dict[str, Any], fits: bool) -> None:
    assert jsonschema_rs.is_valid(schema(body(USER)), answer) is fits


def test_the_embedded_model_must_look_before_it_answers() -> None:
    assert forms(body(USER, compact=True)) == ["terminal"]
    assert forms(body(USER, CALLED, RESULT, compact=True)) == ["terminal", "final"]
    assert forms(body(USER, CALLED, RESULT, USER, compact=True)) == ["terminal"]
    assert forms(body(USER, CALLED, RESULT, CALLED, RESULT, compact=True)) == ["final"]
    assert forms(body(USER, compact=True, tools=())) == ["final"]


def test_any_other_model_may_answer_at_once() -> None:
    assert forms(body(USER)) == ["terminal", "final"]


def test_the_embedded_model_gets_bounded_required_arguments_only() -> None:
    properties = schema(body(USER, compact=True))["properties"]
    assert list(properties) == ["thought", "tool", "command"]
    assert all("maxLength" in properties[name] for name in ("thought", "command"))


def test_arguments_that_cannot_stand_beside_the_thought_are_nested() -> None:
    made = body(USER, tools=(TAKEN,))
    assert jsonschema_rs.is_valid(schema(made), {"thought": "t", "tool": "odd", "arguments": {"tool": "x"}})
    assert 'object in "arguments": odd' in made["messages"][0]["content"]


def test_the_conversation_becomes_plain_text() -> None:
    final = Message(role="assistant", content="There is a.txt.", reasoning="Seen.")
    messages = body(Message(role="system", content="Be good."), USER, CALLED, RESULT, RESULT, final)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"].startswith("Be good.\n\n")
    assert messages[2]["content"] == '{"thought":"I look.","tool":"terminal","command":"ls"}'
    assert messages[3]["content"] == f"Result: {RESULT.content}\n\nResult: {RESULT.content}"
    assert messages[4]["content"] == '{"thought":"Seen.","tool":"final","answer":"There is a.txt."}'
    assert all(set(m) == {"role", "content"} for m in messages)


def test_the_embedded_model_reads_plain_bounded_results() -> None:
    assert body(USER, CALLED, RESULT, compact=True)["messages"][-1]["content"] == "Result: a.txt"
    long = Message(role="tool", content="x" * 10_000)
    assert len(body(USER, CALLED, long, compact=True)["messages"][-1]["content"]) < RESULT_LENGTH + 20


def test_worked_examples_of_a_prefill_stay_as_they_are() -> None:
    example = Message(role="assistant", content='{"thought": "t", "tool": "final", "answer": "a"}')
    assert body(USER, example, USER)["messages"][2]["content"] == example.content


@pytest.mark.parametrize(
    ("text", "content", "made", "reasoning"),
    [
        ('{"thought":"t","tool":"terminal","command":"ls"}', "", [("terminal", '{"command":"ls"}')], "t"),
        ('```json\n{"thought":"t","tool":"terminal","command":"ls"}\n```', "", [("terminal", '{"command":"ls"}')], "t"),
        ('{"thought":"t","tool":"final","answer":"done"}', "done", [], "t"),
        ('{"thought":"t","tool":"final","answer":{"n":1}}', '{"n":1}', [], "t"),
        ('{"thought":"t","tool":"odd","arguments":{"tool":"x"}}', "", [("odd", '{"tool":"x"}')], "t"),
        ('{"thought":null,"tool":"terminal"}', "", [("terminal", "{}")], ""),
    ],
)
async def test_an_answer_is_taken_apart(
    model_at: Any, text: str, content: str, made: list[tuple[str, str]], reasoning: str
) -> None:
    async with ScriptedEndpoint([say(text)]) as endpoint:
        reply = await model_at(endpoint.url, dialect="json").complete(Request(messages=[USER], tools=(TERMINAL,)))
    assert (reply.message.content, reply.message.reasoning, reply.suspect) == (content, reasoning, "")
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == made
    assert reply.finish == ("tool_calls" if made else "stop")


@pytest.mark.parametrize("text", ["Just words.", '{"answer": 3}', '{"thought": "t", "tool":'])
async def test_a_server_that_ignores_the_schema_is_noticed(model_at: Any, text: str) -> None:
    async with ScriptedEndpoint([say(text)]) as endpoint:
        reply = await model_at(endpoint.url, dialect="json").complete(Request(messages=[USER], tools=(TERMINAL,)))
    assert (reply.message.content, reply.suspect) == (text, "not_json")


async def test_a_cut_answer_is_no_call(model_at: Any) -> None:
    turn = say('{"thought":"t","tool":"terminal","command":"rm -r bu', finish="length")
    async with ScriptedEndpoint([turn]) as endpoint:
        reply = await model_at(endpoint.url, dialect="json").complete(Request(messages=[USER], tools=(TERMINAL,)))
    assert (reply.finish, reply.message.tool_calls) == ("length", ())
