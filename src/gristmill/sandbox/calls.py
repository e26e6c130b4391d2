"""One call of the supervisor as the host sees it, and the background job that is made of one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from gristmill.errors import SandboxError
from gristmill.sandbox.base import Job
from gristmill.sandbox.output import Output

FIRST_ASK = 1.0  # seconds until a call that says nothing is asked about; doubled each time
LAST_ASK = 8.0

_REFUSED: dict[int, tuple[type[OSError], str]] = {
    errno.ENOENT: (FileNotFoundError, "No such file"),
    errno.EACCES: (PermissionError, "Permission denied"),
    errno.EISDIR: (IsADirectoryError, "Is a directory"),
    errno.EINVAL: (PermissionError, "Not a regular file"),
}
# What mkdir and cat say, in the C locale.
_SAID: dict[str, tuple[type[OSError], int]] = {
    "Permission denied": (PermissionError, errno.EACCES),
    "Read-only file system": (PermissionError, errno.EROFS),
    "Not a directory": (NotADirectoryError, errno.ENOTDIR),
    "File exists": (NotADirectoryError, errno.ENOTDIR),  # mkdir, of a parent that is a file
    "No such file or directory": (FileNotFoundError, errno.ENOENT),
    "No space left on device": (OSError, errno.ENOSPC),
    "File name too long": (OSError, errno.ENAMETOOLONG),
}


class Pipe(Protocol):
    """Where a call's output comes from."""

    def catch_up(self) -> None:
        """Take what has been printed until now."""
        ...

    def drop(self) -> None:
        """From now on throw away what comes."""
        ...


class Call:
    """What is known of one call. `ended` gets the exit code, or None when its time is up.

    Usually the call's shell reports its end. One that was killed, or that became another program, cannot; then the
    supervisor is asked: when the output ends, and every now and then.
    """

    pipe: Pipe
    note = ""  # a directory that had vanished
    remark = ""  # a sentence about anything else that the user should know
    trusted = False  # our own program, which ends at once when its output has ended
    refused = 0  # errno with which the supervisor declined to read or write a file

    def __init__(self, number: int, order: Callable[[str], None]) -> None:
        self.id = number
        self.files: list[str] = []  # of it, on the host
        self._order = order
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int | None] = self._loop.create_future()
        self.launched: asyncio.Future[int] = self._loop.create_future()
        self._delay = FIRST_ASK
        self._timer = self._loop.call_later(FIRST_ASK, self._ask)

    @property
    def timed_out(self) -> bool:
        """Whether it ended because its time was up."""
        ended = self.ended
        return ended.done() and not ended.cancelled() and not ended.exception() and ended.result() is None

    async def result(self, timeout: float) -> int | None:
        """The exit code; None after `timeout` seconds. Raises `SandboxError` where the sandbox is lost."""
        timer = self._loop.call_later(timeout, self.end, None)
        try:
            return await self.ended
        finally:
            timer.cancel()

    def end(self, code: int | None) -> None:
        """It has ended, or its time is up."""
        if not self.ended.done():
            self.pipe.catch_up()
            self._timer.cancel()
            self.ended.set_result(code)

    def fail(self, error: SandboxError) -> None:
        """The sandbox is lost."""
        self._timer.cancel()
        future: asyncio.Future[Any]
        for future in (self.ended, self.launched):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whether or not someone waits

    def ask_soon(self) -> None:
        """It seems to have ended: ask until that is known."""
        if not self.ended.done():
            self._timer.cancel()
            self._delay = 0.001
            # Its own report may lie there already.
            self._loop.call_soon(self._ask)

    def close(self) -> None:
        """Ask no more."""
        self._timer.cancel()

    def _ask(self) -> None:
        if not self.ended.done():
            self._timer = self._loop.call_later(self._delay, self._ask)
            self._delay = min(2 * self._delay, LAST_ASK)
            with contextlib.suppress(SandboxError):
                self._order(f"{'v' if self.trusted else 'w'} {self.id}")

    def raise_for(self, path: str, said: bytes) -> None:
        """Raise what reading or writing a file came to, unless it went well."""
        if self.refused:
            kind, reason = _REFUSED.get(self.refused, (OSError, os.strerror(self.refused)))
            raise kind(self.refused, reason, path)
        code = self.ended.result()
        if code is None:
            raise TimeoutError(errno.ETIMEDOUT, "No answer in time", path)
        if code:
            text = said.decode(errors="replace").strip()
            for ending, (kind, number) in _SAID.items():
                if text.endswith(ending):
                    raise kind(number, ending, path)
            raise OSError(errno.EIO, text or f"failed with status {code}", path)


class CallJob(Job):
    """A background command that is a call; how its stdin is reached is for subclasses."""

    def __init__(self, call: Call, command: str, output: Output, kill: Callable[[Call], Awaitable[None]]) -> None:
        self.id = str(call.id)
        self.pid = 0
        self.command = command
        self.started = time.time()
        self._call = call
        self._output = output
        self._kill = kill

    @property
    def exit_code(self) -> int | None:
        ended = self._call.ended
        if not ended.done():
            return None
        return 137 if ended.exception() else ended.result()

    def output(self) -> tuple[bytes, int]:
        return self._output.collect()

    async def wait(self, timeout: float) -> bool:
        await asyncio.wait((self._call.ended,), timeout=timeout)
        return self._call.ended.done()

    async def kill(self) -> None:
        ended = self._call.ended
        # Also after its end: what it left running is its tree too. With a lost sandbox all is dead.
        if not ended.done() or not ended.exception():
            await self._kill(self._call)


class ShellJob(CallJob):
    """A job whose stdin is a FIFO."""

    def __init__(
        self, call: Call, command: str, output: Output, stdin: str, kill: Callable[[Call], Awaitable[None]]
    ) -> None:
        super().__init__(call, command, output, kill)
        os.mkfifo(stdin, 0o600)
        # A FIFO opens for writing only where it has a reader, so it gets one for a moment; the supervisor is next.
        reader = os.open(stdin, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._stdin = os.open(stdin, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(reader)
        call.ended.add_done_callback(lambda _: self.hang_up())

    async def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            if self._stdin < 0 or self.exit_code is not None:
                raise BrokenPipeError(errno.EPIPE, "The job's stdin is closed")
            try:
                left = left[os.write(self._stdin, left) :]
            except BlockingIOError:
                await self._writable()

    async def close_stdin(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close its stdin; idempotent."""
        if self._stdin >= 0:
            self._call.ended.get_loop().remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    async def _writable(self) -> None:
        """Until its stdin takes more, or the job has ended."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        descriptor = self._stdin
        loop.add_writer(descriptor, _settle, ready)
        try:
            await asyncio.wait((ready, self._call.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._stdin == descriptor:
                loop.remove_writer(descriptor)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
