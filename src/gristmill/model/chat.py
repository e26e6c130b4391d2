"""OpenAI-compatible chat completions: requests, whole and streamed answers.

Reasoning goes back in the fields that the endpoint knows (`hosts`), raw parts intact: signed and encrypted ones are
useless otherwise.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gristmill.config import ModelConfig
from gristmill.errors import ErrorKind, ModelError
from gristmill.model import caching, classify, hosts, jsontext, reasoning
from gristmill.model.base import Reply, Request
from gristmill.model.deltas import ChatCollector
from gristmill.model.dialect import Collector
from gristmill.types import Message, ToolCall, ToolSchema, Usage

FINISHES = {
    "function_call": "tool_calls",
    "end_turn": "stop",
    "eos": "stop",
    "STOP": "stop",
    "max_tokens": "length",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
}
# Texts that routers give as an answer instead of an error, always without any completion token.
SHIMS = (
    "Connect timeout, please try again later.",
    "Request timed out, please try again later.",
    "Service is busy, please try again later.",
)
_CALL_LIKE = re.compile(
    r"<tool_call>\s*\{|<function=\w|\[TOOL_CALLS\]\s*[\[{\w]|<\|python_tag\|>|<｜tool▁calls▁begin｜>|<\|tool_call"
)
_MAX_CACHED_TOOLS = 1000


class ChatDialect:
    """One model of one chat completions endpoint. `fields` are added to every request body."""

    path = "/chat/completions"

    def __init__(self, config: ModelConfig, *, fields: dict[str, Any] | None = None) -> None:
        self._config = config
        self._host = hosts.host_of(config)
        self._marks = hosts.wants_cache_marks(config)
        self._fields = {"model": config.name, **hosts.request_fields(config), **(fields or {})}
        if config.stream:
            self._fields |= {"stream": True, "stream_options": {"include_usage": True}}
        self._tools: dict[int, tuple[ToolSchema, msgspec.Raw]] = {}

    def headers(self) -> dict[str, str]:
        """Content type and key."""
        headers = {"Content-Type": "application/json", **hosts.headers(self._config)}
        key = self._config.api_key.strip()  # a newline at its end would break the header
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def encode(self, request: Request, more: dict[str, Any] | None = None) -> bytes:
        """The body of a request; `more` is added to its fields."""
        body: dict[str, Any] = {
            **self._fields,
            **(more or {}),
            "messages": [self._message(m) for m in request.messages],
        }
        if self._marks:
            for place in caching.marked(request.messages):
                body["messages"][place] = _with_mark(body["messages"][place])
        if request.tools:
            body["tools"] = [self._tool(schema) for schema in request.tools]
        limit = request.max_tokens if request.max_tokens is not None else self._config.max_tokens
        if limit is not None:
            body[self._host.max_tokens_field] = limit
        return jsontext.encode(body)

    def collector(self) -> Collector:
        """For a streamed answer."""
        return ChatCollector()

    def decode(self, answer: dict[str, Any], request: Request) -> Reply:
        """The reply. Raises `ModelError`: malformed where there is none."""
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
            raise classify.not_an_answer("no choices in the answer", jsontext.encode(answer))
        said = choice.get("finish_reason")
        if said == "insufficient_system_resource":  # DeepSeek: cut short by the server
            raise ModelError("the server ran out of resources in the middle of the answer", ErrorKind.TRANSIENT)
        usage = usage_of(answer.get("usage"))
        found = reasoning.find(message)
        calls, extra = _calls(message)
        text = found.text
        finish = FINISHES.get(str(said), str(said or "stop"))
        if calls and finish == "stop":
            finish = "tool_calls"
        if message.get("refusal") and not calls:
            text, finish = text or str(message["refusal"]), "content_filter"
        suspect = ""
        if answer.get("usage") and not usage.completion_tokens and (text.strip() or calls):
            if text.strip() in SHIMS:
                raise classify.not_an_answer("a router's error text instead of an answer", text)
            suspect = "zero_completion_tokens"
        elif request.tools and not calls and _CALL_LIKE.search(text):
            suspect = "call_like_text"
        return Reply(
            message=Message(
                role="assistant",
                content=text,
                tool_calls=calls,
                reasoning=found.reasoning,
                hidden_reasoning=found.hidden or (usage.reasoning_tokens > 0 and not found.reasoning),
                extra={**found.raw, **extra},
            ),
            finish=finish,
            usage=usage,
            raw=_rest(answer, choice, message, tokens=self._config.record_tokens),
            suspect=suspect,
        )

    def _tool(self, schema: ToolSchema) -> msgspec.Raw:
        # The same schemas come with every request: encoded once. The schema is held, so its id stays its own.
        known = self._tools.get(id(schema))
        if known is None:
            if len(self._tools) >= _MAX_CACHED_TOOLS:
                self._tools.clear()
            known = schema, msgspec.Raw(jsontext.encode({"type": "function", "function": schema}))
            self._tools[id(schema)] = known
        return known[1]

    def _message(self, message: Message) -> dict[str, Any]:
        if message.role == "tool":
            return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
        if message.role != "assistant":
            return {"role": message.role, "content": message.content}
        back: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            back["content"] = message.content or None
            extra = message.extra.get("call_extra") or {}
            back["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                    **(extra.get(str(number)) or {}),
                }
                for number, call in enumerate(message.tool_calls)
            ]
        if message.extra or message.reasoning:
            back |= hosts.reasoning_back(self._host, message)
        return back


def _with_mark(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    if not parts or (parts[-1].get("type") == "text" and not parts[-1].get("text")):
        return message
    parts[-1] = {**parts[-1], **caching.MARK}
    return {**message, "content": parts}


def usage_of(raw: Any) -> Usage:
    """Tokens and the reported cost of a chat completion; all zero where there is nothing, the cost then unknown.

    OpenRouter with the user's own key reports its fee, and beside it the bill of the provider.
    """
    if not isinstance(raw, dict):
        return Usage(cost_known=False)
    completion = raw.get("completion_tokens_details") or {}
    prompt = raw.get("prompt_tokens_details") or {}
    cost = raw.get("cost")
    details = raw.get("cost_details") or {}
    return Usage(
        prompt_tokens=_count(raw.get("prompt_tokens")),
        completion_tokens=_count(raw.get("completion_tokens")),
        reasoning_tokens=_count(completion.get("reasoning_tokens")),
        cached_tokens=_count(prompt.get("cached_tokens") or raw.get("prompt_cache_hit_tokens")),
        cost_usd=_money(cost) + (_money(details.get("upstream_inference_cost")) if raw.get("is_byok") else 0.0),
        cost_known=isinstance(cost, int | float),
    )


def _money(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and value > 0 else 0


def _calls(message: dict[str, Any]) -> tuple[tuple[ToolCall, ...], dict[str, Any]]:
    """The calls, and what else their entries hold (`call_extra`, by position: Gemini's thought signatures, say)."""
    entries = message.get("tool_calls") or ()
    if not entries and message.get("function_call"):
        entries = ({"function": message["function_call"]},)
    calls: list[ToolCall] = []
    extra: dict[str, Any] = {}
    for number, entry in enumerate(entries):
        function = entry.get("function") or entry.get("custom") or {}
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise classify.not_an_answer("a tool call without a name", jsontext.encode(message))
        arguments = function.get("arguments", function.get("input"))
        if arguments is None:
            arguments = "{}"
        elif not isinstance(arguments, str):
            arguments = jsontext.encode(arguments).decode()
        calls.append(ToolCall(id=str(entry.get("id") or ""), name=function["name"], arguments=arguments))
        other = {k: v for k, v in entry.items() if k not in ("id", "type", "index", "function", "custom") and v}
        if other:
            extra[str(number)] = other
    return tuple(calls), {"call_extra": extra} if extra else {}


_TOKENS = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs")
_HELD = ("role", "content", "tool_calls", "function_call", *reasoning.RAW_FIELDS)


def _rest(answer: dict[str, Any], choice: dict[str, Any], message: dict[str, Any], *, tokens: bool) -> dict[str, Any]:
    """The answer without what the `Message` holds; `tokens` keeps token ids and log probabilities."""
    dropped = ("choices", "object", "message", "index", *(() if tokens else _TOKENS))
    rest = {k: v for k, v in answer.items() if k not in dropped and v is not None}
    other = {k: v for k, v in message.items() if k not in _HELD and v}
    kept = {k: v for k, v in choice.items() if k not in dropped and v is not None}
    rest["choice"] = {**kept, "message": other} if other else kept
    return rest
