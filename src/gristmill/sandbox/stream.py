"""Byte streams to programs inside a sandbox, and how reports and output are told apart in what comes from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from gristmill.sandbox.output import BURST, IDLE_PAUSE, PAUSE, Output

REPORT_BYTES = 1 << 14  # the longest report


class Stream(Protocol):
    """A byte stream to a program inside; what the program prints goes to the `Receiver` that it was opened with."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Wait until more should be written, or the stream has ended."""
        ...

    def write_eof(self) -> None: ...

    def pause(self) -> None:
        """Read nothing for now."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class Receiver:
    """What takes what comes from a stream: `token` begins each report, everything else is output."""

    def __init__(self, token: str) -> None:
        self.stream: Stream | None = None
        self.over = False
        self._mark = b"\0\1" + token.encode()
        self._rest = b""
        self._burst = 0

    def printed(self, data: bytes) -> None:
        """Output."""
        raise NotImplementedError

    def reported(self, line: str) -> None:
        """A report."""
        raise NotImplementedError

    def ended(self, reason: str) -> None:
        """The stream has ended; `reason` is a sentence, empty where it ended well."""
        self.over = True

    @property
    def wanted(self) -> bool:
        """Whether somebody wants the output at present."""
        return True

    def take(self, data: bytes) -> None:
        """The next bytes of the stream."""
        self._burst += len(data)
        if self._burst >= BURST and self.stream:
            # A command that prints without end must not starve the event loop's other sessions.
            self._burst = 0
            self.stream.pause()
            asyncio.get_running_loop().call_later(PAUSE if self.wanted else IDLE_PAUSE, self.stream.resume)
        if self._rest:
            data = self._rest + data
        start = self._reports(data)
        # The rest is output, unless a report begins in its last bytes.
        cut = data.find(self._mark, start)
        if cut < 0:
            cut = data.rfind(b"\0", max(start, len(data) - len(self._mark) + 1))
            if cut < 0 or not self._mark.startswith(data[cut:]):
                cut = len(data)
        if cut > start:
            self.printed(data[start:cut])
        self._rest = data[cut:]

    def _reports(self, data: bytes) -> int:
        """Hand on all complete reports with what comes before them; where they end."""
        start = 0
        while (found := data.find(self._mark, start)) >= 0:
            end = data.find(b"\n", found)
            if end < 0:
                if len(data) - found < REPORT_BYTES:
                    break
                end = len(data) - 1  # nonsense, from a command
            if found > start:
                self.printed(data[start:found])
            start = end + 1
            self.reported(data[found + len(self._mark) : end].decode(errors="replace"))
        return start


Connect = Callable[[Sequence[str], Receiver], Awaitable[Stream]]


class Tap:
    """Where a call's output goes. A stream gives it in order with the reports, so nothing is ever outstanding."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.open = True

    def take(self, data: bytes) -> None:
        """What was printed."""
        if self.open:
            self.output.add(data)

    def catch_up(self) -> None:
        """Take what has been printed until now."""

    def drop(self) -> None:
        """From now on throw away what comes."""
        self.open = False
