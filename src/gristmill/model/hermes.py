"""The `hermes` dialect: tools in the system message, calls and results as tagged JSON in the text.

For servers that hand out a model's text as it is. The format is the one that Hermes and Qwen models are trained on:

```
<tool_call>
{"name": "terminal", "arguments": {"command": "ls"}}
</tool_call>
```

with results as `<tool_response>` blocks in a user message. An answer goes back exactly as the model wrote it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gristmill.model import jsontext
from gristmill.model.base import Reply, Request
from gristmill.model.chat import ChatDialect
from gristmill.model.dialect import Collector
from gristmill.types import Message, ToolCall, ToolSchema

_OPEN = re.compile(r"<tool_call>\s*(?=\{)")
_CLOSE = re.compile(r"\s*</tool_call>")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')

_RULES = """\
You can call tools. They are listed between <tools> and </tools>, one JSON object a line with its name, what it does and
the JSON Schema of its arguments:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between these tags; write several such blocks for several
calls:
<tool_call>
{{"name": "the tool's name", "arguments": {{}}}}
</tool_call>
Then stop. Each result comes back between <tool_response> and </tool_response>. When you need no more tools, answer in
plain text."""


class HermesDialect:
    """Chat completions with calls in the text."""

    def __init__(self, chat: ChatDialect) -> None:
        self.path = chat.path
        self._chat = chat
        self._rules: tuple[tuple[ToolSchema, ...], str] = ((), "")

    def headers(self) -> dict[str, str]:
        """Those of chat completions."""
        return self._chat.headers()

    def collector(self) -> Collector:
        """That of chat completions."""
        return self._chat.collector()

    def encode(self, request: Request) -> bytes:
        """The body of a request: plain text messages only."""
        plain = msgspec.structs.replace(request, messages=self._messages(request), tools=())
        # Some models go on to write the result themselves.
        return self._chat.encode(plain, {"stop": ["<tool_response>"]} if request.tools else None)

    def decode(self, answer: dict[str, Any], request: Request) -> Reply:
        """The reply with the calls found in its text."""
        reply = self._chat.decode(answer, msgspec.structs.replace(request, tools=()))
        message = reply.message
        text, calls = find_calls(str(message.content), cut=reply.finish == "length")
        if not calls:
            return reply
        # What the model wrote, to the letter; without it the server would have to guess how to write it again.
        extra = {"content": message.content, **message.extra}
        return msgspec.structs.replace(
            reply,
            message=msgspec.structs.replace(message, content=text, tool_calls=calls, extra=extra),
            finish="tool_calls" if reply.finish == "stop" else reply.finish,
        )

    def _messages(self, request: Request) -> list[Message]:
        messages: list[Message] = []
        results: list[str] = []
        for message in request.messages:
            if message.role == "tool":
                results.append(_result(message))
                continue
            if results:
                messages.append(Message(role="user", content="\n".join(results)))
                results = []
            messages.append(_written(message) if message.role == "assistant" else message)
        if results:
            messages.append(Message(role="user", content="\n".join(results)))
        if not request.tools:
            return messages
        rules = self._rules_for(request.tools)
        if messages and messages[0].role == "system":
            messages[0] = Message(role="system", content=f"{messages[0].content}\n\n{rules}")
        else:
            messages.insert(0, Message(role="system", content=rules))
        return messages

    def _rules_for(self, tools: tuple[ToolSchema, ...]) -> str:
        if self._rules[0] is not tools:
            listed = "\n".join(jsontext.encode(tool).decode() for tool in tools)
            self._rules = tools, _RULES.format(tools=listed)
        return self._rules[1]


def find_calls(text: str, *, cut: bool = False) -> tuple[str, tuple[ToolCall, ...]]:
    """(the text without its call blocks, the calls).

    A block that is not valid JSON is a call all the same, with its raw text as arguments, so that the model is told
    what is wrong with it. Tags that are not followed by an object are mentions. With `cut`, a last block without an end
    is left in the text: a cut call never runs.
    """
    calls: list[ToolCall] = []
    texts: list[str] = []
    position = 0
    while opening := _OPEN.search(text, position):
        start, end = opening.end(), None
        data: Any = None
        try:
            data, end = json.JSONDecoder(strict=False).raw_decode(text, start)
        except (ValueError, RecursionError):
            closing = _CLOSE.search(text, start)
            end = closing.start() if closing else None
        closed = _CLOSE.match(text, len(text) if end is None else end)
        if cut and closed is None:
            break
        texts.append(text[position : opening.start()])
        calls.append(_call(data, text[start:end]))
        position = closed.end() if closed else (len(text) if end is None else end)
    texts.append(text[position:])
    return "".join(texts).strip() if calls else text, tuple(calls)


def _call(data: Any, raw: str) -> ToolCall:
    if isinstance(data, dict) and isinstance(data.get("name"), str):
        arguments = data.get("arguments", data.get("parameters"))
        if not isinstance(arguments, str):
            arguments = "{}" if arguments is None else jsontext.encode(arguments).decode()
        return ToolCall(id="", name=data["name"], arguments=arguments)
    name, arguments = _NAME.search(raw), _ARGUMENTS.search(raw)
    return ToolCall(
        id="", name=name[1] if name else "invalid", arguments=raw[arguments.end() :].strip() if arguments else raw
    )


def _result(message: Message) -> str:
    body = jsontext.encode({"name": message.name, "content": message.content}).decode()
    return f"<tool_response>\n{body}\n</tool_response>"


def _written(message: Message) -> Message:
    """An earlier answer in the model's own words, else as it would have written it."""
    raw = message.extra.get("content")
    if isinstance(raw, str):
        return Message(role="assistant", content=raw)
    blocks = [f"<think>\n{message.reasoning}\n</think>"] if message.reasoning else []
    if message.content:
        blocks.append(str(message.content))
    for call in message.tool_calls:
        name = jsontext.encode(call.name).decode()
        blocks.append(f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>')
    return Message(role="assistant", content="\n".join(blocks))
