"""A streamed chat completion put together again, in the form of a whole one.

Providers differ in how they number the pieces of tool calls: no index, every index 0, null, or drifting. So a piece
with a name of its own begins a call unless it repeats one, a piece without goes to the call that its id or index names,
else to the last one. Names are never joined.
"""

from __future__ import annotations

from typing import Any

from gristmill.errors import ErrorKind, ModelError
from gristmill.model import classify, jsontext

_JOINED = ("reasoning", "reasoning_content", "refusal")


class ChatCollector:
    """Takes the events of one stream in order; `answer` is the body that a plain request would have got."""

    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"index": 0}
        self._text: list[str] = []
        self._parts: list[dict[str, Any]] = []
        self._joined: dict[str, list[str]] = {}
        self._details: list[dict[str, Any]] = []
        self._calls: list[_Call] = []
        self._other: dict[str, Any] = {}

    def feed(self, event: dict[str, Any]) -> None:
        """Take one event. Raises `ModelError` for an error event and for pieces that belong to nothing."""
        if "error" in event or event.get("object") == "error":
            error = classify.inner_error(event)
            if error is not None:
                raise error
        for name, value in event.items():
            if name != "choices" and value is not None:
                self._answer[name] = value
        for choice in event.get("choices") or ():
            if choice.get("index", 0) in (0, None):
                self._take(choice)

    def answer(self) -> dict[str, Any]:
        """The whole answer. Raises `ModelError` where the stream ended too early."""
        if not self._choice.get("finish_reason"):
            raise ModelError("the stream ended without a finish reason", ErrorKind.MALFORMED, status=200)
        message: dict[str, Any] = {"role": "assistant", **self._other}
        if self._parts:
            self._flush_text()
            message["content"] = self._parts
        else:
            message["content"] = "".join(self._text)
        for name, pieces in self._joined.items():
            message[name] = "".join(pieces)
        if self._details:
            message["reasoning_details"] = self._details
        if self._calls:
            message["tool_calls"] = [call.whole() for call in self._calls]
        self._answer["choices"] = [{**self._choice, "message": message}]
        return self._answer

    def _take(self, choice: dict[str, Any]) -> None:
        for name, value in choice.items():
            if name == "delta" or value is None:
                continue
            if name == "token_ids":
                self._choice.setdefault(name, []).extend(value)
            elif name == "logprobs" and isinstance(value, dict):
                kept = self._choice.setdefault(name, {"content": []})
                kept["content"].extend(value.get("content") or ())
            else:
                self._choice[name] = value
        for name, value in (choice.get("delta") or {}).items():
            if value is None or name == "role":
                continue
            if name == "content":
                self._take_content(value)
            elif name in _JOINED and isinstance(value, str):
                self._joined.setdefault(name, []).append(value)
            elif name == "reasoning_details" and isinstance(value, list):
                for detail in value:
                    self._take_detail(detail)
            elif name == "tool_calls":
                for piece in value:
                    self._take_call(piece)
            else:
                self._other[name] = value

    def _take_content(self, value: Any) -> None:
        if isinstance(value, str):
            self._text.append(value)
            return
        for part in value if isinstance(value, list) else ():
            if part.get("type") == "text":
                self._text.append(part.get("text") or "")
            else:
                self._flush_text()
                last = self._parts[-1] if self._parts else {}
                if part.get("type") == "thinking" == last.get("type") and isinstance(last.get("thinking"), list):
                    last["thinking"].extend(part.get("thinking") or ())
                else:
                    self._parts.append(dict(part))

    def _flush_text(self) -> None:
        text = "".join(self._text)
        if text:
            self._parts.append({"type": "text", "text": text})
        self._text.clear()

    def _take_detail(self, detail: dict[str, Any]) -> None:
        last = self._details[-1] if self._details else {}
        same = detail.get("type") == last.get("type") and detail.get("index") == last.get("index")
        if not same or (detail.get("id") and last.get("id") and detail["id"] != last["id"]):
            self._details.append(dict(detail))
            return
        for name, value in detail.items():
            if name in ("text", "summary", "data") and isinstance(value, str):
                last[name] = (last.get(name) or "") + value
            elif value is not None:
                last[name] = value

    def _take_call(self, piece: dict[str, Any]) -> None:
        function = piece.get("function") or {}
        name, call_id, index = function.get("name") or "", piece.get("id") or "", piece.get("index")
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else "" if arguments is None else _as_json(arguments)
        call = self._target(name, call_id, index, text)
        if call is None:
            if not name and not call_id:
                raise ModelError("a piece of a tool call without a call", ErrorKind.MALFORMED, status=200)
            call = _Call(index)
            self._calls.append(call)
        call.name = call.name or name
        call.id = call.id or call_id
        call.pieces.append(text)
        call.other.update({k: v for k, v in piece.items() if k not in ("index", "id", "type", "function") and v})

    def _target(self, name: str, call_id: str, index: Any, text: str) -> _Call | None:
        """The call that a piece goes on with; None where it begins one."""
        by_index = next((c for c in reversed(self._calls) if index is not None and c.index == index), None)
        if call_id:
            known = next((c for c in self._calls if c.id == call_id), None)
            if known is not None and (not name or name == known.name or not known.name):
                return known
            return by_index if by_index is not None and not by_index.id and by_index.name in ("", name) else None
        last = by_index or (self._calls[-1] if self._calls else None)
        if not name:
            return last
        if last is None or (index is not None and by_index is None):
            return None
        repeated = last.name == name and not (text.lstrip().startswith("{") and any(last.pieces))
        return last if not last.name or repeated else None


class _Call:
    __slots__ = ("id", "index", "name", "other", "pieces")

    def __init__(self, index: Any) -> None:
        self.index = index
        self.id = ""
        self.name = ""
        self.pieces: list[str] = []
        self.other: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.pieces)}
        return {"id": self.id, "type": "function", "function": function, **self.other}


def _as_json(value: Any) -> str:
    return jsontext.encode(value).decode()
