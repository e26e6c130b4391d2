"""The live line of a terminal. Imported only where there is one: `rich` costs more than all else that starts a run."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gristmill.cli.console import Lines, Screen


class LiveScreen:
    """Lines that scroll by above one line of figures. Colours as `NO_COLOR` allows."""

    live = True

    def __init__(self, console: Console, lines: Lines) -> None:
        self._console = console
        self._lines = lines
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def write(self, text: str = "") -> None:
        """Write whole lines above the figures."""
        self._console.print(Text(self._lines.fit(text)), soft_wrap=True)

    def figures(self, text: str) -> None:
        """Replace the bottom line."""
        self._live.update(Text(f"⏳ {text}", style="cyan", no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Remove the bottom line and show the cursor again."""
        self._live.stop()


def open_screen(stream: TextIO) -> Screen:
    """A live screen where the terminal can show one, else plain lines."""
    lines = Lines(stream)
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not lines.unicode or not console.is_terminal or console.is_dumb_terminal:
        return lines
    return LiveScreen(console, lines)
