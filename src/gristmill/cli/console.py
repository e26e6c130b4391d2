"""Lines on a console that may not know our characters, may be a pipe, and may go away while we write."""

from __future__ import annotations

import json
import os
from typing import Any, Protocol, TextIO

# What the signs of our lines become where the console has no such character.
_ASCII = {
    "✅": "[ok]",
    "❌": "[failed]",
    "⚠️": "[warning]",
    "🚫": "[discarded]",
    "🔄": "[start]",
    "📊": "[run]",
    "📁": "[files]",
    "⏸️": "[paused]",
    "▶️": "[on]",
    "🛑": "[stopping]",
    "→": "->",
    "…": "...",
    "·": "-",
    "×": "x",
    "≥": ">=",
    "–": "-",
    "━": "=",
}


class Screen(Protocol):
    """Where lines go, and one line of figures that a terminal keeps at its bottom."""

    @property
    def live(self) -> bool:
        """True where `figures` shows something."""
        ...

    def write(self, text: str = "") -> None:
        """Write whole lines."""
        ...

    def figures(self, text: str) -> None:
        """Replace the bottom line."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        ...


class Lines:
    """Whole lines to a stream, each flushed. Writing never raises: characters degrade, and a closed pipe is let go."""

    live = False

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.closed = False

    @property
    def unicode(self) -> bool:
        """True where the console takes every character."""
        return (self.stream.encoding or "ascii").lower().replace("-", "").startswith("utf")

    def write(self, text: str = "") -> None:
        """Write a line, or several."""
        if self.closed:
            return
        try:
            self.stream.write(self.fit(text) + "\n")
            self.stream.flush()
        except OSError:
            # The reader has gone (`… | head`), or the disk under a redirection is full. The work goes on; what is left
            # in the buffer must not raise at exit.
            self.closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def document(self, data: Any) -> None:
        """Write one JSON document, in characters that every console has."""
        self.write(json.dumps(data, indent=2))

    def figures(self, text: str) -> None:
        """There is no bottom line here."""

    def close(self) -> None:
        """Nothing to give back."""

    def fit(self, text: str) -> str:
        """The text in characters that the console has; control characters are shown, not obeyed."""
        text = "".join(c if c.isprintable() or c in "\n\ufe0f\u200d" else _shown(c) for c in text)
        if self.unicode:
            return text
        for sign, plain in _ASCII.items():
            text = text.replace(sign, plain)
        encoding = self.stream.encoding or "ascii"
        return text.encode(encoding, "replace").decode(encoding)


def _shown(character: str) -> str:
    if 0xD800 <= ord(character) < 0xE000:
        return "\ufffd"
    if character == "\t":
        return "  "
    return character.encode("unicode_escape").decode("ascii") if ord(character) < 0xA0 else " "
