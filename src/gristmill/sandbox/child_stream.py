"""Byte streams to programs inside that a command of this machine starts: its stdin and its output are pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence

from gristmill.errors import SandboxError
from gristmill.sandbox.output import BURST, CHUNK
from gristmill.sandbox.process import spawn
from gristmill.sandbox.stream import Receiver

LINGER_SECONDS = 5.0  # for a child to end by itself
WRITE_BYTES = 1 << 18  # that may wait to be written before a writer is held up


class ChildStream:
    """stdin of a child; its output goes to the receiver until it ends, whoever else holds the output then.

    Raises `SandboxError` where it cannot be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()  # to be written
        self._ending = False  # end of file follows what is waiting
        self._paused = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._output = self._stdin = -1
        ends: list[int] = []
        try:
            for _ in range(2):
                ends += os.pipe()
            self._child = spawn(argv, env=env, stdin=ends[0], output=ends[3])
        except OSError as error:
            for end in ends:
                os.close(end)
            raise SandboxError(f"{argv[0]} could not be started: {error}.") from error
        os.close(ends[0])
        os.close(ends[3])
        self._stdin, self._output = ends[1], ends[2]
        for end in (self._stdin, self._output):
            os.set_blocking(end, False)
        self._loop.add_reader(self._output, self._readable)
        self._child.exited.add_done_callback(lambda _: self._exited())

    @property
    def code(self) -> int:
        """Its exit code; minus the signal's number where one killed it, -9 where it has not ended."""
        return self._child.exited.result() if self._child.exited.done() else -9

    def write(self, data: bytes) -> None:
        if self._stdin < 0 or self._ending:
            return
        self._waiting += data
        self._writable()

    async def drain(self) -> None:
        await self._drained.wait()

    def write_eof(self) -> None:
        self._ending = True
        if not self._waiting:
            self._close_stdin()

    def pause(self) -> None:
        self._paused = True
        if self._output >= 0:
            self._loop.remove_reader(self._output)

    def resume(self) -> None:
        self._paused = False
        if self._output >= 0:
            self._loop.add_reader(self._output, self._readable)

    def close(self) -> None:
        if self._output >= 0:
            # What runs inside ends with its stdin, and is then waited for by its parent, which must not be gone before.
            self._loop.call_later(LINGER_SECONDS, self._child.kill)
            self._close_stdin()
            self._loop.call_soon(self._finish)

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()
        self.close()

    def _writable(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._stdin, self._waiting[:BURST])]
        except BlockingIOError:
            self._loop.add_writer(self._stdin, self._writable)
        except OSError:
            self._close_stdin()
        else:
            self._loop.remove_writer(self._stdin)
            if self._ending:
                self._close_stdin()
        if len(self._waiting) > WRITE_BYTES:
            self._drained.clear()
        else:
            self._drained.set()

    def _close_stdin(self) -> None:
        self._waiting.clear()
        self._drained.set()
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if data := os.read(self._output, CHUNK):
                self._receiver.take(data)
            else:
                # Its end follows.
                self._loop.remove_reader(self._output)

    def _exited(self) -> None:
        """Take what it has printed; others may go on for ever."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(BURST // CHUNK):
                if self._output < 0 or not (data := os.read(self._output, CHUNK)):
                    break
                self._receiver.take(data)
        self._finish()

    def _finish(self) -> None:
        if self._output < 0:
            return
        self._close_stdin()
        self._loop.remove_reader(self._output)
        os.close(self._output)
        self._output = -1
        self._receiver.ended("")
