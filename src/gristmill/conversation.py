"""Messages as exchanged become the from/value conversation of a trajectory row, and back.

The form is that of the reference (ShareGPT with Hermes tags), made unambiguous:

```
system  instructions, the offered tools as JSON between <tools> tags, the row's own system text
human   the prompt, verbatim
gpt     <think>\\n…\\n</think>\\n text \\n<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call> …
tool    <tool_response>\\n{"tool_call_id": …, "name": …, "content": …}\\n</tool_response> …
```

Text that itself contains one of these tags is marked with a backslash: a model that *writes* `</think>` gives
`<\\/think>`, one that writes `<\\/think>` gives `<\\\\/think>`, so taking one backslash away restores it. Inside JSON
the same tags have `\\u003c` for `<`, which every JSON reader undoes. `parse_gpt` and `parse_tool` are the inverse
of what is written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gristmill.prompt import IMAGE_MARK
from gristmill.types import Message, ToolCall, ToolSchema

_TAG = r"(\\*/?(?:think|tool_call|tool_response|tools)>)"
_OPEN = re.compile("<" + _TAG)
_MARKED = re.compile(r"<\\" + _TAG)
_OPEN_BYTES = re.compile(b"<" + _TAG.encode())
_THINK = re.compile(r"<think>\n(.*?)</think>\n?", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_ENCODER = msgspec.json.Encoder()

AGENT_PROMPT = (
    "You are an agent that solves the user's task by using tools in a sandbox of your own. "
    "Look before you conclude, check what you did, and answer when the task is done."
)

CALL_INSTRUCTIONS = (
    "Tools may be called in any turn. The tools on offer stand as a JSON list between <tools> tags. A call is one JSON "
    'object {"name": <tool>, "arguments": <object>} between <tool_call> tags; several calls may follow one another. '
    "Each result comes back between <tool_response> tags, in the order of the calls. Reasoning stands between <think> "
    "tags before the text."
)


def mark_tags(text: str) -> str:
    """Put a backslash into every envelope tag that the text itself contains."""
    return _OPEN.sub(r"<\\\1", text) if "<" in text else text


def unmark_tags(text: str) -> str:
    """The inverse of `mark_tags`."""
    return _MARKED.sub(r"<\1", text) if "<\\" in text else text


def one_line_json(value: Any) -> str:
    """JSON on one line with `, ` and `: `, envelope tags inside strings as `\\u003c…`."""
    data = msgspec.json.format(_ENCODER.encode(value), indent=0)
    if b"<" in data:
        data = _OPEN_BYTES.sub(rb"\\u003c\1", data)
    return data.decode()


def system_turn(tools: Sequence[ToolSchema], system: str) -> str:
    """The text of the `system` turn: our instructions, the offered tools, the row's own system text."""
    listed = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools]
    parts = [AGENT_PROMPT, CALL_INSTRUCTIONS, f"<tools>\n{one_line_json(listed)}\n</tools>"]
    if system:
        parts.append(mark_tags(system))
    return "\n\n".join(parts)


def gpt_turn(message: Message) -> str:
    """The text of a `gpt` turn: a think block (always), the text, and one block per call."""
    reasoning = mark_tags(message.reasoning)
    think = f"<think>\n{reasoning}\n</think>\n" if reasoning else "<think>\n</think>\n"
    parts = [mark_tags(plain_text(message.content))] if message.content else []
    for call in message.tool_calls:
        block = one_line_json({"name": call.name, "arguments": _arguments(call.arguments)})
        parts.append(f"<tool_call>\n{block}\n</tool_call>")
    return think + "\n".join(parts)


def tool_turn(results: Iterable[Message]) -> str:
    """The text of the one `tool` turn that answers all calls of a `gpt` turn."""
    blocks = []
    for result in results:
        block = one_line_json(
            {"tool_call_id": result.tool_call_id, "name": result.name, "content": _content(plain_text(result.content))}
        )
        blocks.append(f"<tool_response>\n{block}\n</tool_response>")
    return "\n".join(blocks)


def to_conversation(messages: Sequence[Message], tools: Sequence[ToolSchema], system: str) -> list[dict[str, Any]]:
    """The turns `{from, value, tool_calls}` of a session.

    Args:
        messages: prompt, history, answers and results in order; system messages among them are left out, `system` is
            their text. Arguments of calls are already one JSON text in fixed form, or the raw text of a refused call.
        tools: what was offered.
        system: the row's own system text, may be empty.
    """
    turns: list[dict[str, Any]] = [_turn("system", system_turn(tools, system))]
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if message.role == "user":
            turns.append(_turn("human", plain_text(message.content)))
        elif message.role == "assistant":
            calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
            turns.append(_turn("gpt", gpt_turn(message), calls))
        elif message.role == "tool":
            end = position
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            turns.append(_turn("tool", tool_turn(messages[position - 1 : end])))
            position = end
    return turns


def parse_gpt(value: str) -> Message:
    """The message that `gpt_turn` wrote. Call ids are not in the text, so they come back empty."""
    head = _THINK.match(value)
    reasoning = head.group(1).removesuffix("\n") if head else ""
    rest = value[head.end() :] if head else value
    first = rest.find("<tool_call>\n")
    text = rest if first < 0 else rest[:first].removesuffix("\n")
    calls = []
    for block in _CALL.findall(rest if first >= 0 else ""):
        call = msgspec.json.decode(block)
        arguments = call["arguments"]
        raw = arguments if isinstance(arguments, str) else _ENCODER.encode(arguments).decode()
        calls.append(ToolCall(id="", name=call["name"], arguments=raw))
    return Message(
        role="assistant", content=unmark_tags(text), reasoning=unmark_tags(reasoning), tool_calls=tuple(calls)
    )


def parse_tool(value: str) -> list[dict[str, Any]]:
    """The responses `{tool_call_id, name, content}` that `tool_turn` wrote."""
    return [msgspec.json.decode(block) for block in _RESPONSE.findall(value)]


def plain_text(content: str | list[dict[str, Any]]) -> str:
    """The text of a message; a picture becomes the mark that the task's own text has for it."""
    if isinstance(content, str):
        return content
    return "\n".join(str(p.get("text", "")) if p.get("type") == "text" else IMAGE_MARK for p in content)


def _turn(speaker: str, value: str, calls: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {"from": speaker, "value": value, "tool_calls": calls or []}


def _arguments(text: str) -> Any:
    """A JSON object as it is; anything else as the text that the model sent, so that nothing is lost."""
    return _raw_json(text) if text[:1] == "{" else text


def _content(text: str) -> Any:
    """A result that is a JSON object or list stands as such, other text as text."""
    return _raw_json(text) if text[:1] in ("{", "[") else text


def _raw_json(text: str) -> msgspec.Raw | str:
    # Raw keeps every digit of numbers that no machine type holds.
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return msgspec.Raw(text.encode())
