"""The three shapes of a prompt: text, content parts, chat messages.

Parts and messages are in the form of OpenAI's chat completions API:

```
"prompt": "What is in this picture?"
"prompt": [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:…"}}]
"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
```
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from gristmill.task import RowRefused
from gristmill.types import Message

IMAGE_MARK = "[image]"  # stands for a picture where a prompt is shown as text

_FORMS = "it must be text, content parts or chat messages"
_ROLES = ("system", "user", "assistant")
_MESSAGE_KEYS = frozenset({"role", "content", "name"})


def read_prompt(value: Any) -> tuple[str, tuple[Message, ...]]:
    """The prompt's text for the `human` turn, and its messages (none for a plain text).

    Raises:
        RowRefused: the value has none of the three shapes, or is empty.
    """
    history: tuple[Message, ...] = ()
    if isinstance(value, str):
        text = value
    elif not isinstance(value, list):
        raise RowRefused(f"the prompt is {type_name(value)}; {_FORMS}")
    elif not value:
        raise RowRefused(f"the prompt is an empty list; {_FORMS}")
    elif all(isinstance(item, dict) and "role" in item for item in value):
        text, history = _read_messages(value)
    else:
        parts = _read_parts(value, "the prompt")
        text, history = _parts_text(parts), (Message(role="user", content=parts),)
    if not text or text.isspace():
        raise RowRefused("the prompt is empty")
    return text, history


def type_name(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"


def _read_messages(items: list[dict[str, Any]]) -> tuple[str, tuple[Message, ...]]:
    messages = tuple(_read_message(item, number) for number, item in enumerate(items, 1))
    last = messages[-1]
    if last.role != "user":
        raise RowRefused(f"the last message of the prompt is of role '{last.role}'; it must be 'user'")
    if any(later.role == "system" and earlier.role != "system" for earlier, later in pairwise(messages)):
        raise RowRefused("a system message of the prompt stands behind other messages; they come first")
    text = last.content if isinstance(last.content, str) else _parts_text(last.content)
    return text, messages


def _read_message(item: dict[str, Any], number: int) -> Message:
    where = f"message {number} of the prompt"
    role, content, name = item["role"], item.get("content"), item.get("name")
    if role not in _ROLES:
        raise RowRefused(f"{where} is of role {role!r}; known are {', '.join(_ROLES)}")
    # Loaders fill columns of other rows with null, so only a key with a value says something.
    unknown = sorted(key for key, value in item.items() if value is not None and key not in _MESSAGE_KEYS)
    if unknown:
        raise RowRefused(f"{where} has '{unknown[0]}'; a message holds role, content and name")
    if name is not None and not isinstance(name, str):
        raise RowRefused(f"the name of {where} is {type_name(name)}, not text")
    if isinstance(content, list) and content and role == "user":
        content = _read_parts(content, where)
    elif not isinstance(content, str):
        raise RowRefused(f"the content of {where} is {type_name(content)}, not text")
    return Message(role=role, content=content, name=name or "")


def _read_parts(items: list[Any], where: str) -> list[dict[str, Any]]:
    return [_read_part(item, f"part {number} of {where}") for number, item in enumerate(items, 1)]


def _read_part(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RowRefused(f"{where} is {type_name(item)}, not an object with a type")
    part = {key: value for key, value in item.items() if value is not None}
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RowRefused(f"{where} has no text")
    elif kind == "image_url":
        image = part.get("image_url")
        image = {"url": image} if isinstance(image, str) else image
        if not isinstance(image, dict) or not isinstance(image.get("url"), str) or not image["url"]:
            raise RowRefused(f"{where} has no image_url with a url")
        part["image_url"] = {key: value for key, value in image.items() if value is not None}
    else:
        raise RowRefused(f"{where} is of type {kind!r}; known are text and image_url")
    return part


def _parts_text(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] if part["type"] == "text" else IMAGE_MARK for part in parts)
