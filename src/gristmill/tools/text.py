"""Text that a model may read: valid Unicode, bounded, never cut inside a character or a joined cluster of them.

Bytes that are not UTF-8 and lone surrogates become U+FFFD; NUL is shown as the four characters `\\x00` (JSON escapes it
anyway, as `\\u0000`). A text over its limit keeps 40 % of the room for its head, 60 % for its tail, and between them a
notice that says how much was left out, all within the limit.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import orjson

HEAD_SHARE = 0.4
CLUSTER_LIMIT = 32  # characters; a longer chain of joined characters may be cut between two of them
FLAG_LIMIT = 2_000  # letters of flags in a row that are counted to find the pairs
DEPTH_LIMIT = 60  # nesting shown of a result that orjson refuses

_SURROGATE = re.compile("[\ud800-\udfff]")
_JOINER = "\u200d"
_JSON_OPTIONS = orjson.OPT_NON_STR_KEYS


def valid_text(text: str) -> str:
    """The text with each lone surrogate as U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def shown_text(text: str) -> str:
    """Valid text with NUL shown escaped."""
    return valid_text(text).replace("\0", "\\x00")


def json_text(value: Any) -> str:
    """Compact JSON of any value: what JSON cannot say becomes text, what is not a number becomes null."""
    try:
        return orjson.dumps(value, default=str, option=_JSON_OPTIONS).decode()
    except (TypeError, RecursionError):  # orjson: lone surrogates, integers over 64 bits, deep nesting
        return orjson.dumps(_plain(value, 0), option=_JSON_OPTIONS).decode()


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else f"{value:#x}" if value.bit_length() > 10_000 else str(value)
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, (dict, list, tuple)):
        if depth == DEPTH_LIMIT:
            return f"<{type(value).__name__}, nested too deeply to show>"
        if isinstance(value, dict):
            return {_said(key): _plain(item, depth + 1) for key, item in value.items()}
        return [_plain(item, depth + 1) for item in value]
    return _said(value)


def _said(value: Any) -> str:
    try:
        return valid_text(bounded(str(value), 10_000))
    except Exception:  # noqa: BLE001 - an object of other people's code that cannot even be shown
        return f"<{type(value).__name__}>"


def decode(data: bytes) -> tuple[str, bool]:
    """The bytes as text with NUL shown escaped, and whether they look binary (not UTF-8, or with NUL)."""
    try:
        text, binary = data.decode(), False
    except UnicodeDecodeError:
        text, binary = data.decode("utf-8", "replace"), True
    if "\0" in text:
        return text.replace("\0", "\\x00"), True
    return text, binary


def decode_output(data: bytes, dropped: int, head_bytes: int, limit: int) -> tuple[str, bool]:
    """A command's output as at most `limit` characters, and whether it looks binary.

    Where `dropped` bytes are missing behind the first `head_bytes`, the pieces of a character on both sides of the gap
    are left out too, so that the gap itself never makes a U+FFFD.
    """
    if not dropped:
        text, binary = decode(data)
        return shorten(text, limit), binary
    head, head_binary = decode(without_torn_end(data[:head_bytes]))
    tail, tail_binary = decode(_without_torn_start(data[head_bytes:]))
    return join_cut(head, tail, limit, total=len(data) + dropped), head_binary or tail_binary


def without_torn_end(data: bytes) -> bytes:
    """Without the beginning of a UTF-8 character that the end cuts off."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte < 0x80:
            return data
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < size else data
    return data


def _without_torn_start(data: bytes) -> bytes:
    """Without the rest of a UTF-8 character (up to three bytes) that the start cuts off."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def shorten(text: str, limit: int) -> str:
    """The text, or its head and tail with a notice between, at most `limit` characters."""
    return text if len(text) <= limit else join_cut(text, text, limit)


def join_cut(head: str, tail: str, limit: int, total: int | None = None) -> str:
    """The beginning of `head`, a notice, and the end of `tail`, at most `limit` characters.

    Without `total` both are the same text and what is left out is counted in characters; with it, in bytes of `total`.
    """
    unit = "characters" if total is None else "bytes"
    size = len(head) if total is None else total
    room = limit - len(_notice(size, unit))
    if room <= 0:
        return bounded(head, limit)
    first = head[: cut_before(head, int(room * HEAD_SHARE))]
    last = tail[cut_after(tail, max(0, len(tail) - (room - int(room * HEAD_SHARE)))) :]
    kept = len(first) + len(last) if total is None else len(first.encode()) + len(last.encode())
    return first + _notice(max(0, size - kept), unit) + last


def _notice(left_out: int, unit: str) -> str:
    return f"\n\n[… {left_out:,} {unit} left out …]\n\n"


def bounded(text: str, limit: int, mark: str = "…") -> str:
    """The text's beginning with a mark where it was cut, at most `limit` characters."""
    if len(text) <= limit:
        return text
    return text[: cut_before(text, max(0, limit - len(mark)))] + mark[:limit]


def last_part(text: str, limit: int) -> str:
    """The text's end with a mark where it was cut, at most `limit` characters."""
    return text if len(text) <= limit else "…" + text[cut_after(text, len(text) - limit + 1) :]


def cut_before(text: str, at: int) -> int:
    """The last place up to `at` where the text can be cut without parting joined characters."""
    place = min(at, len(text))
    while place > max(0, at - CLUSTER_LIMIT) and _joined(text, place):
        place -= 1
    return place if not _joined(text, place) else min(at, len(text))


def cut_after(text: str, at: int) -> int:
    """The first place from `at` on where the text can be cut without parting joined characters."""
    place = at
    while place < min(len(text), at + CLUSTER_LIMIT) and _joined(text, place):
        place += 1
    return place if not _joined(text, place) else at


def _joined(text: str, place: int) -> bool:
    """True where the characters on both sides of `place` are shown as one (UAX #29, without Hangul and Indic rules)."""
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    if after.isascii():
        return before == _JOINER or (before == "\r" and after == "\n")
    if _is_flag_half(before) and _is_flag_half(after):
        run = 0
        while run < min(place, FLAG_LIMIT) and _is_flag_half(text[place - 1 - run]):
            run += 1
        return run % 2 == 1
    return before == _JOINER or _extends(after)


def _is_flag_half(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _extends(character: str) -> bool:
    """Combining marks, variation selectors, the joiner, skin tones and tag characters."""
    return (
        unicodedata.category(character) in ("Mn", "Me", "Mc")
        or character == _JOINER
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e007f"
    )
