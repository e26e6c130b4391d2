"""The `json` dialect: every answer is one JSON object, constrained by a JSON Schema, for models without native calls.

```
{"thought": …, "tool": "terminal", "command": "ls"}      a call: the tool's arguments beside the thought
{"thought": …, "tool": "final", "answer": …}             the end
Result: …                                                what a tool gave, as a user message
```

It needs a server with structured output (`response_format` of type `json_schema`: vLLM, SGLang, llama.cpp, …). For
the embedded model everything is kept small: few words in the system message, short strings, only required arguments,
and the end is offered only once a tool has run, for a model of that size would otherwise answer without looking, and
nothing else once it repeats itself.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gristmill.model import jsontext
from gristmill.model.base import Reply, Request
from gristmill.model.chat import ChatDialect
from gristmill.model.dialect import Collector
from gristmill.types import Message, ToolCall, ToolSchema

FINAL = "final"
THOUGHT_LENGTH = 120  # characters, embedded model only, like the next two
ARGUMENT_LENGTH = 80
ANSWER_LENGTH = 200
RESULT_LENGTH = 1500

_RULES = (
    "Answer with exactly one JSON object and nothing else.\n"
    'To use a tool: {"thought": why, "tool": its name, and its arguments beside them}. '
    'Its result comes back in a message that begins with "Result:".\n'
    'When the task is done: {"thought": why, "tool": "final", "answer": the answer to the user}.'
)


class JsonDialect:
    """Chat completions whose answers follow a schema. `compact` is the form for the embedded model."""

    def __init__(self, chat: ChatDialect, *, compact: bool = False) -> None:
        self.path = chat.path
        self._chat = chat
        self._compact = compact

    def headers(self) -> dict[str, str]:
        """Those of chat completions."""
        return self._chat.headers()

    def collector(self) -> Collector:
        """That of chat completions."""
        return self._chat.collector()

    def encode(self, request: Request) -> bytes:
        """The body of a request: the conversation as plain text messages, the tools as a schema of the answer."""
        schema = self._schema(request)
        more: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        }
        if self._compact:
            more |= {"temperature": 0, "max_tokens": 400}
        plain = msgspec.structs.replace(request, messages=self._messages(request), tools=())
        return self._chat.encode(plain, more)

    def decode(self, answer: dict[str, Any], request: Request) -> Reply:
        """The reply; text that is not such an object is an answer as it stands, marked `not_json`."""
        reply = self._chat.decode(answer, msgspec.structs.replace(request, tools=()))
        message = reply.message
        text = str(message.content)
        said = _object(text)
        if said is None or not isinstance(said.get("tool"), str):
            suspect = reply.suspect if reply.finish == "length" else "not_json"
            return msgspec.structs.replace(reply, suspect=suspect)
        thought, name = str(said.pop("thought", "") or ""), said.pop("tool")
        fields: dict[str, Any] = {"reasoning": message.reasoning or thought, "extra": {}}
        if name == FINAL:
            final = said.get("answer", "")
            fields["content"] = final if isinstance(final, str) else jsontext.encode(final).decode()
            finish = reply.finish
        else:
            arguments = said.get("arguments") if set(said) == {"arguments"} else said
            fields["content"] = ""
            fields["tool_calls"] = (ToolCall(id="", name=name, arguments=jsontext.encode(arguments).decode()),)
            finish = "tool_calls" if reply.finish == "stop" else reply.finish
        return msgspec.structs.replace(reply, message=msgspec.structs.replace(message, **fields), finish=finish)

    # -- the request ---------------------------------------------------------------------------------------------

    def _schema(self, request: Request) -> dict[str, Any]:
        repeats = self._compact and _repeats_itself(request)
        forms = [] if repeats else [self._call_form(tool) for tool in request.tools]
        if not forms or not self._compact or _has_result(request):
            forms.append(self._form(FINAL, {"answer": self._string(ANSWER_LENGTH)}, ["answer"]))
        return forms[0] if len(forms) == 1 else {"oneOf": forms}

    def _call_form(self, tool: ToolSchema) -> dict[str, Any]:
        properties: dict[str, Any] = tool.parameters.get("properties") or {}
        required: list[str] = list(tool.parameters.get("required") or ())
        if _nests(tool):
            return self._form(tool.name, {"arguments": {"type": "object"}}, ["arguments"])
        if self._compact:
            names = required or list(properties)
            properties = {name: _short(properties[name]) for name in names if name in properties}
        return self._form(tool.name, properties, required)

    def _form(self, name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"thought": self._string(THOUGHT_LENGTH), "tool": {"const": name}, **properties},
            "required": ["thought", "tool", *required],
            "additionalProperties": False,
        }

    def _string(self, length: int) -> dict[str, Any]:
        return {"type": "string", "maxLength": length} if self._compact else {"type": "string"}

    def _messages(self, request: Request) -> list[Message]:
        messages: list[Message] = []
        results: list[str] = []
        for message in request.messages:
            if message.role == "tool":
                results.append("Result: " + self._result(str(message.content)))
                continue
            if results:
                messages.append(Message(role="user", content="\n\n".join(results)))
                results = []
            messages.append(_as_text(message) if message.role == "assistant" else message)
        if results:
            messages.append(Message(role="user", content="\n\n".join(results)))
        rules = self._rules(request.tools)
        if messages and messages[0].role == "system":
            messages[0] = Message(role="system", content=f"{messages[0].content}\n\n{rules}")
        else:
            messages.insert(0, Message(role="system", content=rules))
        return messages

    def _result(self, text: str) -> str:
        if not self._compact:
            return text
        # A small model reads a command's plain output, as the worked examples show it, far better than JSON.
        shape = _object(text)
        if shape is not None and isinstance(shape.get("output"), str) and not shape.get("error"):
            text = shape["output"].strip() or "done"
        return text if len(text) <= RESULT_LENGTH else text[:RESULT_LENGTH] + " …"

    def _rules(self, tools: tuple[ToolSchema, ...]) -> str:
        if self._compact:
            lines = [f"{t.name}: {t.description.partition('.')[0][:ARGUMENT_LENGTH]}" for t in tools]
            return "Answer with one JSON object. Tools:\n" + "\n".join(lines)
        offered = "\n".join(jsontext.encode(tool).decode() for tool in tools)
        nested = ", ".join(tool.name for tool in tools if _nests(tool))
        more = f'\nThese take their arguments as an object in "arguments": {nested}.' if nested else ""
        return f"{_RULES}{more}\n\nTools:\n{offered}" if tools else _RULES


def _nests(tool: ToolSchema) -> bool:
    """True where the arguments cannot stand beside the thought: taken names, or references into the tool's schema."""
    properties = tool.parameters.get("properties") or {}
    return "tool" in properties or "thought" in properties or b'"$ref"' in jsontext.encode(tool.parameters)


def _has_result(request: Request) -> bool:
    for message in reversed(request.messages):
        if message.role in ("tool", "user"):
            return message.role == "tool"
    return False


def _repeats_itself(request: Request) -> bool:
    """True where the last two calls are the same: a small model would go on so for ever."""
    calls = [(c.name, c.arguments) for m in request.messages for c in m.tool_calls]
    return _has_result(request) and len(calls) > 1 and calls[-1] == calls[-2]


def _short(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    short = {name: value for name, value in schema.items() if name not in ("description", "default", "examples")}
    if short.get("type") == "string" and "enum" not in short:
        short["maxLength"] = min(short.get("maxLength", ARGUMENT_LENGTH), ARGUMENT_LENGTH)
    return short


def _as_text(message: Message) -> Message:
    """An earlier answer as the model would have written it."""
    content = str(message.content)
    said = _object(content)
    if not message.tool_calls:
        if said is not None and "tool" in said:  # a worked example of the user's prefill
            return Message(role="assistant", content=content)
        return _written({"thought": message.reasoning, "tool": FINAL, "answer": content})
    lines = []
    for call in message.tool_calls:
        arguments = _object(call.arguments)
        beside = {"arguments": call.arguments} if arguments is None else arguments
        if "tool" in beside or "thought" in beside:
            beside = {"arguments": arguments}
        lines.append(_written({"thought": message.reasoning or content, "tool": call.name, **beside}).content)
    return Message(role="assistant", content="\n".join(map(str, lines)))


def _written(data: dict[str, Any]) -> Message:
    return Message(role="assistant", content=jsontext.encode(data).decode())


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, also in a code fence; None where it is none."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or text[:start].strip(" \n`").lower() not in ("", "json"):
        return None
    try:
        data = jsontext.decode(text[start : end + 1])
    except ValueError:
        return None
    return data if isinstance(data, dict) else None
