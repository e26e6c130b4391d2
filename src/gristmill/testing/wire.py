"""A scripted turn in the words of a protocol: OpenAI chat completions and Anthropic Messages, whole or as events."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from gristmill.testing.script import Turn, arguments_text

PIECE = 24  # characters of one streamed piece; small, so that tags and arguments are cut


def call_ids(turn: Turn, request: dict[str, Any]) -> list[str]:
    """Ids that depend only on the place in the conversation, so that a retry sees the same ones."""
    place = len(request.get("messages") or [])
    return [f"call_{place}_{number}" for number in range(len(turn.calls))]


def usage_of(turn: Turn, size: int) -> tuple[int, int]:
    """(prompt, completion) tokens: the turn's own, else about four bytes each."""
    if turn.usage is not None:
        return turn.usage
    said = len(turn.text) + len(turn.reasoning) + sum(len(n) + len(arguments_text(a)) for n, a in turn.calls)
    return size // 4, max(1, said // 4)


def chat_completion(turn: Turn, request: dict[str, Any], size: int) -> dict[str, Any]:
    """The body of a chat completion; `size` is that of the request in bytes."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
    if turn.reasoning:
        message[turn.reasoning_field] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_text(arguments)}}
            for call_id, (name, arguments) in zip(call_ids(turn, request), turn.calls, strict=True)
        ]
    message.update(turn.message)
    return {
        "id": _answer_id("chatcmpl", request),
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model", "scripted"),
        "choices": [
            {"index": 0, "message": message, "finish_reason": turn.finish or ("tool_calls" if turn.calls else "stop")}
        ],
        "usage": _chat_usage(turn, size),
    }


def chat_events(turn: Turn, request: dict[str, Any], size: int) -> list[bytes]:
    """The same as server-sent events, in small pieces."""
    answer = chat_completion(turn, request, size)
    choice = answer["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in (turn.reasoning_field, "content"):
        text = message.get(name)
        deltas += [{name: piece} for piece in _pieces(text)] if isinstance(text, str) else []
    for name, value in message.items():
        if name not in ("role", "content", "tool_calls", turn.reasoning_field):
            deltas.append({name: value})
    for index, made in enumerate(message.get("tool_calls") or ()):
        function = made["function"]
        deltas.append({"tool_calls": [{**made, "index": index, "function": {**function, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in _pieces(function["arguments"])
        ]
    head = {k: answer[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return [event(chunk) for chunk in chunks] + [event("[DONE]")]


def anthropic_message(turn: Turn, request: dict[str, Any], size: int) -> dict[str, Any]:
    """The body of an Anthropic message."""
    content: list[dict[str, Any]] = []
    if turn.reasoning:
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": _signature(turn.reasoning)})
    if turn.text:
        content.append({"type": "text", "text": turn.text})
    for call_id, (name, arguments) in zip(call_ids(turn, request), turn.calls, strict=True):
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        content.append({"type": "tool_use", "id": call_id, "name": name, "input": parsed})
    stop = {"": "tool_use" if turn.calls else "end_turn", "length": "max_tokens"}.get(turn.finish, turn.finish)
    prompt, completion = usage_of(turn, size)
    return {
        "id": _answer_id("msg", request),
        "type": "message",
        "role": "assistant",
        "model": request.get("model", "scripted"),
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": completion},
    }


def anthropic_events(turn: Turn, request: dict[str, Any], size: int) -> list[bytes]:
    """The same as server-sent events."""
    answer = anthropic_message(turn, request, size)
    usage = answer["usage"]
    start = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, block in enumerate(answer["content"]):
        events += [{"index": index, **part} for part in _block_events(block)]
    delta = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": usage["output_tokens"]}})
    events.append({"type": "message_stop"})
    return [b"event: " + item["type"].encode() + b"\n" + event(item) for item in events]


def event(data: Any) -> bytes:
    """One server-sent event: JSON data, or text as it is."""
    return b"data: " + (data.encode() if isinstance(data, str) else msgspec.json.encode(data)) + b"\n\n"


def _block_events(block: dict[str, Any]) -> list[dict[str, Any]]:
    def deltas(kind: str, name: str, text: str) -> list[dict[str, Any]]:
        return [{"type": "content_block_delta", "delta": {"type": kind, name: piece}} for piece in _pieces(text)]

    if block["type"] == "thinking":
        empty: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        middle = deltas("thinking_delta", "thinking", block["thinking"])
        middle += deltas("signature_delta", "signature", block["signature"])
    elif block["type"] == "text":
        empty = {"type": "text", "text": ""}
        middle = deltas("text_delta", "text", block["text"])
    else:
        empty = {**block, "input": {}}
        middle = deltas("input_json_delta", "partial_json", msgspec.json.encode(block["input"]).decode())
    return [{"type": "content_block_start", "content_block": empty}, *middle, {"type": "content_block_stop"}]


def _pieces(text: str | None) -> list[str]:
    return [text[start : start + PIECE] for start in range(0, len(text or ""), PIECE)] if text else []


def _chat_usage(turn: Turn, size: int) -> dict[str, Any]:
    prompt, completion = usage_of(turn, size)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if turn.cost is not None:
        usage["cost"] = turn.cost
    return usage


def _answer_id(prefix: str, request: dict[str, Any]) -> str:
    return f"{prefix}-{len(request.get('messages') or [])}"


def _signature(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
