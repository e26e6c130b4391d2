"""What a command prints: bounded in memory, and read from its FIFO without starving the event loop's other sessions."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable

from gristmill.sandbox.base import OUTPUT_HEAD, OUTPUT_TAIL

CHUNK = 1 << 16  # bytes of one read: what a FIFO holds at first
BURST = 1 << 20  # bytes read without a pause; a FIFO in a burst is made to hold as much
PAUSE = 0.004  # seconds after a burst: a command that prints without end gets 200 MB/s and a tenth of the loop
IDLE_PAUSE = 0.1  # the same where nobody wants the output any more


class Output:
    """The first `head` and the last `tail` bytes of a stream; `total` counts all of them."""

    __slots__ = ("_first", "_head", "_last", "_tail", "total")

    def __init__(self, head: int = OUTPUT_HEAD, tail: int = OUTPUT_TAIL) -> None:
        self._head = head
        self._tail = tail
        self._first = bytearray()
        self._last = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head - len(self._first)
        if room > 0:
            self._first += data[:room]
            data = data[room:]
        if len(data) >= self._tail:
            self._last[:] = data[len(data) - self._tail :]
        elif data:
            self._last += data
            # Cut seldom: cutting moves the whole tail.
            if len(self._last) > 2 * self._tail:
                del self._last[: -self._tail]

    def collect(self) -> tuple[bytes, int]:
        """What is kept, and how many bytes between head and tail are not."""
        dropped = max(0, self.total - self._head - self._tail)
        excess = max(0, len(self._last) - self._tail)
        return bytes(self._first + self._last[excess:]), dropped


class Fifo:
    """Makes a FIFO and reads it until its last writer has closed it.

    `take` gets the bytes; after `drop` they are read and thrown away, so that writers never wait or die of SIGPIPE.
    `lasting` keeps the reader when no writer is left. `on_end` is called once, at the last writer's end.
    """

    def __init__(
        self,
        path: str,
        take: Callable[[bytes], None] | None,
        on_end: Callable[[], None] | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        os.mkfifo(path, 0o600)
        # With a writer of its own a FIFO never ends.
        self._fd = os.open(path, (os.O_RDWR if lasting else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
        self._take = take
        self._on_end = on_end
        self._burst = 0
        self._chunk = CHUNK
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._fd, self._read)

    def catch_up(self) -> None:
        """Take what has been written until now."""
        self._read(BURST)

    def drop(self) -> None:
        """From now on throw away what comes."""
        self._take = None

    def close(self) -> None:
        """Stop reading; idempotent."""
        if self._fd >= 0:
            self._rest()
            os.close(self._fd)
            self._fd = -1

    def _read(self, size: int = 0) -> None:
        if self._fd < 0:
            return
        try:
            data = os.read(self._fd, size or self._chunk)
        except BlockingIOError:
            return
        if not data:
            self.close()
            if self._on_end:
                self._on_end()
            return
        if self._take:
            self._take(data)
        self._burst += len(data)
        if self._burst >= BURST and self._timer is None:
            self._rest()
            self._timer = self._loop.call_later(PAUSE if self._take else IDLE_PAUSE, self._go_on)

    def _rest(self) -> None:
        if self._timer is None:
            self._loop.remove_reader(self._fd)
        else:
            self._timer.cancel()
            self._timer = None

    def _go_on(self) -> None:
        self._timer = None
        if self._chunk != BURST:
            self._chunk = BURST
            with contextlib.suppress(OSError):  # more than the user's share of pipe memory: the usual size does too
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, BURST)
        self._burst = 0
        self._loop.add_reader(self._fd, self._read)
