"""The conversation form: exact shape, and the round trip for any text."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gristmill.conversation import gpt_turn, mark_tags, parse_gpt, parse_tool, to_conversation, tool_turn, unmark_tags
from gristmill.prompt import read_prompt
from gristmill.types import Message, ToolCall, ToolSchema

TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "<\\/think>",
    "<\\\\think>",
    "\n",
    "<tools>",
]
tricky = st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=8)), max_size=8).map("".join)
text = tricky.map(lambda s: s.encode("utf-8", "replace").decode())
arguments = st.dictionaries(text, st.one_of(text, st.integers(-(2**53), 2**53), st.booleans(), st.none()), max_size=4)


@given(text, text, st.lists(st.tuples(text.filter(bool), arguments), max_size=3))
def test_ex_14_gpt_turn_comes_back_as_it_was(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    """EX-14: content with the envelope's own tags."""
    message = Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(id="", name=n, arguments=json.dumps(a)) for n, a in calls),
    )
    value = gpt_turn(message)
    assert value.count("</think>") == 1
    assert value.count("<tool_call>") == len(calls) == value.count("</tool_call>")
    back = parse_gpt(value)
    assert (back.reasoning, back.content) == (reasoning, content)
    assert [(c.name, json.loads(c.arguments)) for c in back.tool_calls] == [(n, a) for n, a in calls]


@given(st.lists(st.tuples(text, text, text), min_size=1, max_size=3))
def test_ex_14_tool_turn_comes_back_as_it_was(results: list[tuple[str, str, str]]) -> None:
    messages = [Message(role="tool", tool_call_id=i, name=n, content=json.dumps({"output": c})) for i, n, c in results]
    value = tool_turn(messages)
    assert value.count("<tool_response>") == len(results)
    back = parse_tool(value)
    assert [(b["tool_call_id"], b["name"], b["content"]["output"]) for b in back] == results


@given(tricky)
def test_marking_is_undone(value: str) -> None:
    assert unmark_tags(mark_tags(value)) == value


def test_ex_12_parallel_calls_are_one_turn_and_their_results_another() -> None:
    """EX-12: one gpt turn with reasoning, text and both calls, then one tool turn in the same order."""
    messages = [
        Message(role="user", content="q"),
        Message(
            role="assistant",
            content="Let me check both.",
            reasoning="R",
            tool_calls=(
                ToolCall(id="a", name="terminal", arguments='{"command":"echo A"}'),
                ToolCall(id="b", name="t"),
            ),
        ),
        Message(role="tool", tool_call_id="a", name="terminal", content='{"output":"A"}'),
        Message(role="tool", tool_call_id="b", name="t", content="plain"),
        Message(role="assistant", content="done"),
    ]
    tools = [ToolSchema(name="terminal", description="d", parameters={"type": "object"})]
    turns = to_conversation(messages, tools, "row system")
    assert [t["from"] for t in turns] == ["system", "human", "gpt", "tool", "gpt"]
    assert '<tools>\n[{"type": "function"' in turns[0]["value"] and turns[0]["value"].endswith("row system")
    assert turns[1] == {"from": "human", "value": "q", "tool_calls": []}
    assert turns[2]["value"] == (
        "<think>\nR\n</think>\nLet me check both.\n"
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo A"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'
    )
    assert [c["id"] for c in turns[2]["tool_calls"]] == ["a", "b"]
    assert turns[3]["value"] == (
        '<tool_response>\n{"tool_call_id": "a", "name": "terminal", "content": {"output": "A"}}\n</tool_response>\n'
        '<tool_response>\n{"tool_call_id": "b", "name": "t", "content": "plain"}\n</tool_response>'
    )
    assert turns[4]["value"] == "<think>\n</think>\ndone"


def test_mr_05_refused_arguments_stay_as_the_model_sent_them() -> None:
    """MR-05: raw text of malformed arguments is kept, losslessly."""
    raw = '{"command": "rm -r build" "cwd": '
    message = Message(role="assistant", tool_calls=(ToolCall(id="1", name="terminal", arguments=raw),))
    assert parse_gpt(gpt_turn(message)).tool_calls[0].arguments == raw


def test_the_human_turn_is_the_text_that_the_task_has() -> None:
    """A prompt of content parts reads the same in the trajectory, in tombstones and when a resume looks for it."""
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    text, history = read_prompt(parts)
    assert to_conversation(history, (), "")[1]["value"] == text == "What is it?\n[image]"
