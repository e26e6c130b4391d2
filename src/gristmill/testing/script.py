"""What a scripted model says: turns, and the scripts that pick one for a request.

```python
script = [call("terminal", {"command": "ls"}), say("There is one file.")]
```

A turn is picked by the number of assistant messages that the request carries, never by a counter of the server. So
thousands of sessions at once, retries and resumed runs all get the same answers. After the last turn of a list, the
last one is given again.

A script is one of
- a list of turns, for every conversation;
- a dict `{piece of the prompt: list of turns}`, the first piece that occurs in a user message decides; `""` fits all;
- a callable `(request_json, headers) -> Turn | list[Turn]`; a list is picked from as above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

Fault = Literal["", "reset", "cut", "silent"]


@dataclass(frozen=True)
class Turn:
    """One answer, good or bad, independent of the protocol that it is asked in.

    Args:
        text: the visible answer.
        calls: (name, arguments) pairs; arguments as a dict, or as the exact text to send.
        reasoning: readable reasoning, sent in the field `reasoning_field`.
        finish: `stop`, `tool_calls`, `length`, …; empty: what fits.
        usage: (prompt, completion) tokens; None: estimated from the sizes.
        cost: US dollars that the endpoint reports, None where it does not.
        message: fields that are merged over the message of a chat completion.
        status, headers, body: an answer sent as it is, where `body` is not None: bytes, text, or JSON data.
        events: server-sent events as they are (dicts, or text such as `[DONE]`); the stream just ends after the last.
        latency: seconds before the answer begins.
        drip: seconds between single bytes of the answer; 0 sends it whole.
        fault: `reset` the connection instead of answering; `cut` it in the middle of the answer; stay `silent` until
            the client goes away.
        before: answers given first to each conversation at this point, one per try ("fails twice, then works").
    """

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any] | str], ...] = ()
    reasoning: str = ""
    reasoning_field: str = "reasoning_content"
    finish: str = ""
    usage: tuple[int, int] | None = None
    cost: float | None = None
    message: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    events: tuple[Any, ...] | None = None
    latency: float = 0.0
    drip: float = 0.0
    fault: Fault = ""
    before: tuple[Turn, ...] = ()

    def after(self, *failures: Turn) -> Turn:
        """The same turn, reached only after these answers, one per try."""
        return replace(self, before=failures)


Script = Sequence[Turn] | Mapping[str, Sequence[Turn]] | Callable[[dict[str, Any], Mapping[str, str]], Any]


def say(text: str, *, reasoning: str = "", **fields: Any) -> Turn:
    """A final answer. `fields` are those of `Turn`."""
    return Turn(text=text, reasoning=reasoning, **fields)


def call(name: str, arguments: dict[str, Any] | str | None = None, *, reasoning: str = "", **fields: Any) -> Turn:
    """One tool call."""
    return Turn(calls=((name, {} if arguments is None else arguments),), reasoning=reasoning, **fields)


def calls(*pairs: tuple[str, dict[str, Any] | str], reasoning: str = "", **fields: Any) -> Turn:
    """Several tool calls in one turn, each `(name, arguments)`."""
    return Turn(calls=pairs, reasoning=reasoning, **fields)


def fail(status: int, body: Any = "", *, headers: Mapping[str, str] | None = None, **fields: Any) -> Turn:
    """An answer with this status and exactly this body (text, bytes or JSON data)."""
    return Turn(status=status, body=body, headers=headers or {}, **fields)


def turn_from_data(data: dict[str, Any]) -> Turn:
    """A turn from JSON: a whole chat completion, `{status, headers, body}`, `{sse: […]}`, or the fields of `Turn`.

    `{"say": text, …}` and `{"call": name, "arguments": {…}, …}` are short forms.
    Raises ValueError for a field that does not exist.
    """
    if "choices" in data or "error" in data:
        return Turn(body=data)
    if "sse" in data:
        return Turn(events=tuple(data["sse"]))
    fields = dict(data)
    if "say" in fields:
        fields["text"] = fields.pop("say")
    if "call" in fields:
        fields["calls"] = [[fields.pop("call"), fields.pop("arguments", {})]]
    if "calls" in fields:
        fields["calls"] = tuple((name, arguments) for name, arguments in fields["calls"])
    if "before" in fields:
        fields["before"] = tuple(turn_from_data(item) for item in fields["before"])
    for name in ("usage", "events"):
        if fields.get(name) is not None:
            fields[name] = tuple(fields[name])
    unknown = set(fields) - set(Turn.__dataclass_fields__)
    if unknown:
        raise ValueError(f"a turn has no field {', '.join(sorted(unknown))}")
    return Turn(**fields)


def script_from_data(data: Any) -> Script:
    """A script from JSON: a list of turns, or `{"prompts": {piece: [turns]}, "default": [turns]}`."""
    if isinstance(data, list):
        return [turn_from_data(item) for item in data]
    table = {piece: [turn_from_data(item) for item in turns] for piece, turns in data.get("prompts", {}).items()}
    if "default" in data:
        table[""] = [turn_from_data(item) for item in data["default"]]
    return table


def pick(script: Script, request: dict[str, Any], headers: Mapping[str, str], *, prefill: int = 0) -> Turn:
    """The turn for a request. `prefill` is the number of assistant messages that stand before the conversation."""
    messages = request.get("messages") or []
    chosen: Any = script
    if callable(chosen):
        chosen = chosen(request, headers)
    elif isinstance(chosen, Mapping):
        prompts = [_plain(m.get("content")) for m in messages if m.get("role") == "user"]
        chosen = next((turns for piece, turns in chosen.items() if any(piece in text for text in prompts)), None)
        if chosen is None:
            return fail(400, {"error": {"message": "the script has no entry for this prompt"}})
    if isinstance(chosen, Turn):
        return chosen
    told = sum(1 for m in messages if m.get("role") == "assistant") - prefill
    return chosen[min(max(told, 0), len(chosen) - 1)]  # type: ignore[no-any-return]


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, dict))


def arguments_text(arguments: dict[str, Any] | str) -> str:
    """Arguments as the text that goes over the wire."""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
