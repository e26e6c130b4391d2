"""Calls as tagged JSON in the text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.model import jsontext
from gristmill.model.base import Request
from gristmill.model.hermes import find_calls
from gristmill.testing.endpoint import ScriptedEndpoint, say
from gristmill.types import Message, ToolCall, ToolSchema

TOOL = ToolSchema(name="terminal", description="Run.", parameters={"type": "object", "properties": {}})
USER = Message(role="user", content="Go.")


def found(text: str, *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    rest, calls = find_calls(text, cut=cut)
    return rest, [(c.name, c.arguments) for c in calls]


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ('<tool_call>\n{"name": "t", "arguments": {"a": 1}}\n</tool_call>', "", [("t", '{"a":1}')]),
        ('So:\n<tool_call>{"name":"t"}</tool_call>', "So:", [("t", "{}")]),
        ('<tool_call>{"name":"t","parameters":{"a":1}}</tool_call>', "", [("t", '{"a":1}')]),
        ('<tool_call>{"name":"t","arguments":"{\\"a\\":1}"}</tool_call>', "", [("t", '{"a":1}')]),
        ('<tool_call>{"name":"t","arguments":{}}', "", [("t", "{}")]),
        (
            '<tool_call>{"name":"t","arguments":{"c":"</tool_call>"}}</tool_call>',
            "",
            [("t", '{"c":"</tool_call>"}')],
        ),
        (
            '<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"name":"b","arguments":{}}</tool_call>',
            "",
            [("a", "{}"), ("b", "{}")],
        ),
        ('<tool_call>{"name": "t", "arguments": {"a": 1,}}</tool_call>', "", [("t", '{"a": 1,}}')]),
        ("<tool_call>{oops}</tool_call>", "", [("invalid", "{oops}")]),
        ('<tool_call>[1, 2]</tool_call>{"x"}', '<tool_call>[1, 2]</tool_call>{"x"}', []),
        ("Models write <tool_call> blocks.", "Models write <tool_call> blocks.", []),
    ],
)
def test_calls_are_found_in_the_text(text: str, rest: str, calls: list[tuple[str, str]]) -> None:
    assert found(text) == (rest, calls)


def test_a_cut_call_never_runs() -> None:
    text = '<tool_call>{"name":"a","arguments":{}}</tool_call><tool_call>{"name":"rm","arguments":{"p":"/w'
    rest, calls = found(text, cut=True)
    assert calls == [("a", "{}")]
    assert rest.startswith('<tool_call>{"name":"rm"')


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), st.text(max_size=20))
def test_whatever_the_arguments_hold_they_come_back(arguments: dict[str, str], before: str) -> None:
    before = before.replace("<tool_call>", "")
    block = jsontext.encode({"name": "t", "arguments": arguments}).decode()
    _, ((name, raw),) = found(f"{before}\n<tool_call>\n{block}\n</tool_call>")
    assert name == "t"
    assert jsontext.decode(raw) == jsontext.decode(jsontext.encode(arguments))


async def test_the_answer_goes_back_to_the_letter(model_at: Any) -> None:
    raw = '<think>\nhm\n</think>\nWell.\n<tool_call>{"name":"terminal",  "arguments":{}}</tool_call>'
    async with ScriptedEndpoint([say(raw), say("done")]) as endpoint:
        model = model_at(endpoint.url, dialect="hermes")
        first = await model.complete(Request(messages=[USER], tools=(TOOL,)))
        assert (first.message.content, first.message.reasoning, first.finish) == ("Well.", "hm", "tool_calls")
        result = Message(role="tool", name="terminal", content='{"output": "x"}')
        last = await model.complete(Request(messages=[USER, first.message, result], tools=(TOOL,)))
        sent = endpoint.requests[1].body
    assert last.message.content == "done"
    assert sent["messages"][2]["content"] == raw
    assert sent["messages"][3] == {
        "role": "user",
        "content": '<tool_response>\n{"name":"terminal","content":"{\\"output\\": \\"x\\"}"}\n</tool_response>',
    }
    assert sent["stop"] == ["<tool_response>"]
    assert '"name":"terminal"' in sent["messages"][0]["content"]


async def test_history_of_another_make_is_written_in_the_format(model_at: Any) -> None:
    earlier = Message(
        role="assistant", reasoning="R", content="C", tool_calls=(ToolCall(id="1", name="t", arguments='{"a":1}'),)
    )
    async with ScriptedEndpoint([say("done")]) as endpoint:
        await model_at(endpoint.url, dialect="hermes").complete(Request(messages=[USER, earlier]))
        content = endpoint.requests[0].body["messages"][1]["content"]
    assert content.startswith("<think>\nR\n</think>\nC\n<tool_call>")
    assert found(content.split("</think>")[1]) == ("C", [("t", '{"a":1}')])
