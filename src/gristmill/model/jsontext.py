"""JSON at the border to an endpoint: fast, and tolerant of the lone surrogates that models produce."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_SURROGATE = re.compile("[\ud800-\udfff]")


def encode(data: Any) -> bytes:
    """Data as JSON bytes; a lone surrogate becomes U+FFFD."""
    try:
        return msgspec.json.encode(data)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid(data))


def decode(raw: bytes | str) -> Any:
    """JSON bytes as data; escaped or raw lone surrogates become U+FFFD. Raises ValueError for what is not JSON."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig", "replace")
        try:
            return _valid(json.loads(text, parse_constant=lambda name: None))
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None


def valid_text(text: str) -> str:
    """The text with lone surrogates replaced."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _valid(data: Any) -> Any:
    if isinstance(data, str):
        return valid_text(data)
    if isinstance(data, list | tuple):
        return [_valid(item) for item in data]
    if isinstance(data, dict):
        return {_valid(key): _valid(value) for key, value in data.items()}
    return data
