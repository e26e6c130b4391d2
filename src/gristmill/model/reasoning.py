"""Where a model's reasoning hides, and how it is found exactly once.

In order: the fields `reasoning`, `reasoning_content`, `reasoning_details[]`; thinking parts of a content list; a
leading `<think>`, `<thinking>` or `<REASONING_SCRATCHPAD>` block of the text. Where a field holds reasoning, the text
is not searched, so tags that an answer merely mentions stay.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

TAGS = ("think", "thinking", "REASONING_SCRATCHPAD")
RAW_FIELDS = ("reasoning", "reasoning_content", "reasoning_details")

_OPEN = re.compile(rf"\s*<({'|'.join(TAGS)})>", re.IGNORECASE)
_CLOSE = re.compile(rf"</({'|'.join(TAGS)})>", re.IGNORECASE)
_ANY_OPEN = re.compile(rf"<({'|'.join(TAGS)})>", re.IGNORECASE)


class Found(NamedTuple):
    """An answer taken apart. `hidden`: there is reasoning, but encrypted only. `raw`: the provider's fields, intact."""

    text: str
    reasoning: str
    hidden: bool
    raw: dict[str, Any]


def find(message: dict[str, Any]) -> Found:
    """Take an assistant message of a chat completion apart."""
    raw = {name: message[name] for name in RAW_FIELDS if message.get(name)}
    content = message.get("content")
    thought = ""
    if isinstance(content, list):
        raw["content"] = content
        content, thought = _from_parts(content)
    text = content if isinstance(content, str) else ""
    reasoning = _as_text(message.get("reasoning")) or _as_text(message.get("reasoning_content"))
    hidden = False
    if not reasoning and message.get("reasoning_details"):
        reasoning, hidden = from_details(message["reasoning_details"])
    reasoning = reasoning or thought
    if reasoning or hidden:
        return Found(text, reasoning, hidden and not reasoning, raw)
    reasoning, rest = split_leading(text)
    if rest != text:
        raw.setdefault("content", text)
    return Found(rest, reasoning, False, raw)


def from_details(details: Any) -> tuple[str, bool]:
    """(readable text, whether anything is encrypted) of OpenRouter's `reasoning_details`."""
    pieces, encrypted = [], False
    for detail in details if isinstance(details, list) else ():
        if not isinstance(detail, dict):
            continue
        readable = _as_text(detail.get("text")) or _as_text(detail.get("summary"))
        if readable:
            pieces.append(readable)
        encrypted = encrypted or bool(detail.get("data"))
    return "\n".join(pieces), encrypted


def split_leading(text: str) -> tuple[str, str]:
    """(reasoning, visible text) of a text that may begin with thinking blocks.

    A block that is never closed is reasoning to its end. A closing tag without an opening one ends the reasoning where
    it stands at the edge of a line outside of code: some chat templates put the opening tag into the prompt.
    """
    if "<" not in text:
        return "", text
    thoughts: list[str] = []
    rest = text
    while opening := _OPEN.match(rest):
        closing = re.compile(rf"</{opening[1]}>", re.IGNORECASE).search(rest, opening.end())
        thoughts.append(rest[opening.end() : closing.start() if closing else len(rest)].strip())
        rest = rest[closing.end() :] if closing else ""
    if thoughts:
        return "\n\n".join(filter(None, thoughts)), rest.strip()
    return _before_lone_closing(text)


def _before_lone_closing(text: str) -> tuple[str, str]:
    closing = _CLOSE.search(text)
    if closing is None:
        return "", text
    before, after = text[: closing.start()], text[closing.end() :]
    at_edge = before.endswith("\n") or not before or after.startswith(("\n", "\r\n")) or not after
    if not at_edge or _ANY_OPEN.search(before) or before.count("```") % 2:
        return "", text
    return before.strip(), after.strip()


def _from_parts(parts: list[Any]) -> tuple[str, str]:
    """(text, thinking) of content parts; a part that is neither is shown as `[its type]`."""
    texts, thoughts = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            kind = part.get("type")
            if kind in ("thinking", "reasoning"):
                thoughts.append(_as_text(part.get("thinking") or part.get("text")))
            elif isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind != "redacted_thinking":
                texts.append(f"[{kind}]")
    return "".join(texts), "\n".join(filter(None, thoughts))


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_as_text(part.get("text") if isinstance(part, dict) else part) for part in value)
    if isinstance(value, dict):
        return _as_text(value.get("text") or value.get("content") or value.get("summary"))
    return ""
