"""The Anthropic Messages API, natively: thinking blocks with their signatures, tool use, cache marks, streams.

An answer's blocks are kept in `Message.extra["blocks"]` in their order and go back unchanged, which the API demands of
thinking blocks in front of tool use; only tool calls are taken from the message: the session may have renumbered them.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from gristmill.config import ModelConfig
from gristmill.errors import ErrorKind, ModelError
from gristmill.model import caching, classify, jsontext
from gristmill.model.base import Reply, Request
from gristmill.model.dialect import Collector
from gristmill.model.hosts import nearest
from gristmill.types import Message, ToolCall, ToolSchema, Usage

VERSION = "2023-06-01"
FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "refusal": "content_filter",
}
# Thinking tokens of Claude up to 4.5, which takes a budget instead of an effort.
BUDGETS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 24576, "max": 32000, "ultra": 32000}


class Claude(NamedTuple):
    """What a model name tells. An unknown name is taken for a new model."""

    version: tuple[int, int]
    efforts: tuple[str, ...]  # of `output_config`
    adaptive: bool  # decides itself how much to think; older ones take a budget
    thinks: bool
    output: int  # tokens that it can write in one answer, or as many as are sensible


def claude(name: str) -> Claude:
    """What is known of a Claude model."""
    found = re.search(r"claude-(?:[a-z]+-)?(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)", name)
    version = (int(found[1]), int(found[2] or 0)) if found else (99, 0)
    if version < (3, 7):
        return Claude(version, (), False, False, 4096 if version < (3, 5) else 8192)
    if version < (4, 6):
        return Claude(version, (), False, True, 32_000)
    levels = ("low", "medium", "high", "max") if version == (4, 6) else ("low", "medium", "high", "xhigh", "max")
    return Claude(version, levels, True, True, 32_000)


class AnthropicDialect:
    """One model of an endpoint that speaks the Messages API."""

    def __init__(self, config: ModelConfig) -> None:
        self.path = messages_path(config)
        self._config = config
        self._model = claude(config.name)
        self._fields: dict[str, Any] = {"model": config.name}
        if config.stream:
            self._fields["stream"] = True

    def headers(self) -> dict[str, str]:
        """Content type, version and key."""
        headers = {"Content-Type": "application/json", "anthropic-version": VERSION}
        key = self._config.api_key.strip()
        if key:
            headers["x-api-key"] = key
            if not self._config.host.endswith("anthropic.com"):
                headers["Authorization"] = f"Bearer {key}"  # other hosts of this API differ
        return headers

    def encode(self, request: Request) -> bytes:
        """The body of a request."""
        limit = request.max_tokens or self._config.max_tokens or self._model.output
        body = {**self._fields, "max_tokens": limit, **self._thinking(limit)}
        marks = caching.marked(request.messages)
        system = [m for m in request.messages if m.role == "system"]
        if system:
            body["system"] = _texts([m.content for m in system], mark=0 in marks)
        body["messages"] = _turns(request.messages, marks)
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        return jsontext.encode(body)

    def collector(self) -> Collector:
        """For a streamed answer."""
        return MessageCollector()

    def decode(self, answer: dict[str, Any], request: Request) -> Reply:
        """The reply. Raises `ModelError`: malformed where there is none, context overflow where the window is full."""
        blocks = answer.get("content")
        said = answer.get("stop_reason")
        if not isinstance(blocks, list) or not said:
            raise classify.not_an_answer("no content in the answer", jsontext.encode(answer))
        if said == "model_context_window_exceeded":
            raise ModelError("the answer ran into the end of the model's context window", ErrorKind.CONTEXT, status=200)
        texts, thoughts, hidden = [], [], False
        calls: list[ToolCall] = []
        kept: list[dict[str, Any]] = []
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_use":
                arguments = jsontext.encode(block.get("input") or {}).decode()
                if isinstance(block.get("input"), str):
                    arguments = block["input"]  # a stream that was cut in the middle of it
                kept.append({"type": "tool_use", "call": len(calls)})
                calls.append(ToolCall(id=str(block.get("id") or ""), name=str(block.get("name")), arguments=arguments))
                continue
            kept.append(block)
            if kind == "text":
                texts.append(block.get("text") or "")
            elif kind == "thinking":
                thoughts.append(block.get("thinking") or "")
                hidden = hidden or not block.get("thinking")
            elif kind == "redacted_thinking":
                hidden = True
        reasoning = "\n\n".join(filter(None, thoughts))
        return Reply(
            message=Message(
                role="assistant",
                content="".join(texts),
                tool_calls=tuple(calls),
                reasoning=reasoning,
                hidden_reasoning=hidden and not reasoning,
                # Plain text alone needs no blocks to be rebuilt.
                extra={"blocks": kept} if any(b.get("type") != "text" for b in kept) else {},
            ),
            finish=FINISHES.get(said, said),
            usage=usage_of(answer.get("usage")),
            raw={k: v for k, v in answer.items() if k not in ("content", "type", "role") and v is not None},
        )

    def _thinking(self, limit: int) -> dict[str, Any]:
        effort = self._config.reasoning_effort
        # Left out rather than disabled: some models refuse that word, and without it none thinks unasked but those.
        if self._config.reasoning_disabled or effort == "none" or not self._model.thinks:
            return {}
        if not self._model.adaptive:
            budget = min(BUDGETS[effort or "medium"], limit - 1024)
            return {"thinking": {"type": "enabled", "budget_tokens": budget}} if budget >= 1024 else {}
        # Newer models leave the text of their thoughts out unless a summary is asked for.
        fields: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "summarized"}}
        if effort is not None:
            fields["output_config"] = {"effort": nearest(effort, self._model.efforts)}
        return fields


def messages_path(config: ModelConfig) -> str:
    """The path under the base URL, which may or may not end with the version."""
    return "/messages" if config.base_url.rstrip("/").endswith("/v1") else "/v1/messages"


def warnings_for(config: ModelConfig) -> list[str]:
    """One sentence for each flag that has no effect here, or another one than it says."""
    found = []
    model, effort = claude(config.name), config.reasoning_effort
    if effort is not None and effort != "none" and not config.reasoning_disabled:
        if not model.thinks:
            found.append(f"--reasoning_effort has no effect with {config.name}: it does not reason.")
        elif model.adaptive and nearest(effort, model.efforts) != effort:
            found.append(
                f"{config.name} has no reasoning effort {effort}: {nearest(effort, model.efforts)} is sent instead."
            )
    if config.providers_allowed or config.providers_ignored or config.providers_order or config.provider_sort:
        found.append(f"The --provider… flags have no effect with {config.host}: only OpenRouter routes.")
    if config.record_tokens:
        found.append("--record_tokens has no effect with the Messages API: it does not return token ids.")
    return found


class MessageCollector:
    """Puts the events of one stream together."""

    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._json: dict[int, list[str]] = {}

    def feed(self, event: dict[str, Any]) -> None:
        """Take one event. Raises `ModelError` for an error event."""
        kind = event.get("type")
        if kind == "error" or "error" in event:
            error = classify.inner_error(event)
            if error is not None:
                raise error
        elif kind == "message_start":
            self._answer.update(event.get("message") or {})
        elif kind == "content_block_start":
            self._blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta":
            self._take_delta(event["index"], event["delta"])
        elif kind == "message_delta":
            self._answer.update({k: v for k, v in (event.get("delta") or {}).items() if v is not None})
            self._answer["usage"] = {**(self._answer.get("usage") or {}), **(event.get("usage") or {})}

    def answer(self) -> dict[str, Any]:
        """The whole message. Raises `ModelError` where the stream ended too early."""
        if not self._answer.get("stop_reason"):
            raise ModelError("the stream ended without a stop reason", ErrorKind.MALFORMED, status=200)
        for index, pieces in self._json.items():
            text = "".join(pieces)
            try:
                self._blocks[index]["input"] = jsontext.decode(text) if text.strip() else {}
            except ValueError:
                self._blocks[index]["input"] = text
        return {**self._answer, "content": [self._blocks[index] for index in sorted(self._blocks)]}

    def _take_delta(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks.get(index)
        if block is None:
            raise ModelError("a piece of a block without a block", ErrorKind.MALFORMED, status=200)
        if "partial_json" in delta:
            self._json.setdefault(index, []).append(delta["partial_json"])
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] = (block.get(name) or "") + delta[name]


def usage_of(raw: Any) -> Usage:
    """Tokens of a message; `input_tokens` leaves out what was read from or written to the cache."""
    if not isinstance(raw, dict):
        return Usage(cost_known=False)
    read = raw.get("cache_read_input_tokens") or 0
    details = raw.get("output_tokens_details") or {}
    return Usage(
        prompt_tokens=(raw.get("input_tokens") or 0) + read + (raw.get("cache_creation_input_tokens") or 0),
        completion_tokens=raw.get("output_tokens") or 0,
        reasoning_tokens=details.get("thinking_tokens") or details.get("reasoning_tokens") or 0,
        cached_tokens=read,
        cost_known=False,
    )


def _tool(schema: ToolSchema) -> dict[str, Any]:
    return {"name": schema.name, "description": schema.description, "input_schema": schema.parameters}


def _turns(messages: Any, marks: set[int]) -> list[dict[str, Any]]:
    """User and assistant turns in alternation: results and texts that follow each other share a turn."""
    turns: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if message.role == "system":
            continue
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message)
        if not blocks:
            continue
        if place in marks:
            blocks[-1] = {**blocks[-1], **caching.MARK}
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": _call_id(message.tool_call_id), "content": message.content}
        return [result if message.content else {**result, "content": "(empty)"}]
    if message.role == "user":
        return _texts([message.content])
    calls = [
        {"type": "tool_use", "id": _call_id(call.id), "name": call.name, "input": _input(call.arguments)}
        for call in message.tool_calls
    ]
    kept = message.extra.get("blocks")
    if kept is None:
        return [*_texts([message.content]), *calls]
    blocks: list[dict[str, Any]] = []
    used = 0
    for block in kept:
        if block.get("type") == "tool_use":
            blocks += calls[block["call"] : block["call"] + 1]
            used = max(used, block["call"] + 1)
        elif block.get("type") != "text" or block.get("text"):
            blocks.append(block)
    return blocks + calls[used:]


def _texts(contents: list[Any], *, mark: bool = False) -> list[dict[str, Any]]:
    """Text and image blocks of contents in the OpenAI form; the API refuses empty ones."""
    blocks: list[dict[str, Any]] = []
    for content in contents:
        parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part.get("type") == "image_url":
                blocks.append({"type": "image", "source": _source(str((part.get("image_url") or {}).get("url")))})
            elif part.get("text"):
                blocks.append({"type": "text", "text": part["text"]})
    if mark and blocks:
        blocks[-1] = {**blocks[-1], **caching.MARK}
    return blocks


def _source(url: str) -> dict[str, Any]:
    found = re.match(r"data:([\w/+.-]+);base64,", url)
    if found is None:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": found[1], "data": url[found.end() :]}


def _call_id(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", call_id) or "_"


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as the object that the API demands; text that is none goes back inside one."""
    try:
        data = jsontext.decode(arguments)
    except ValueError:
        data = None
    return data if isinstance(data, dict) else {"arguments": arguments}
