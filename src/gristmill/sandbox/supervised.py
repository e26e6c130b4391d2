"""`exec`, `spawn`, `read` and `write` of every sandbox inside which a supervisor runs, however it is reached.

`shell.ShellSandbox` shares a directory with the inside; `stream.StreamSandbox` has byte streams only.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, TypeVar

from gristmill.errors import SandboxError
from gristmill.sandbox.base import ExecResult, Job, Sandbox, SandboxSpec
from gristmill.sandbox.calls import Call, CallJob
from gristmill.sandbox.output import Output

START_SECONDS = 30.0
FILE_SECONDS = 60.0  # for reading or writing one file


C = TypeVar("C", bound=Call)


class Supervising(Protocol[C]):
    """The host's end of a supervisor."""

    def open(self, output: Output) -> C:
        """A new call; nothing has been ordered yet. It must be closed or abandoned."""
        ...

    async def place(self, call: C, suffix: str, data: bytes) -> None:
        """Hand over what a call needs: `.sh` is its text, or the path of its file; `.in` is its stdin, or content."""
        ...

    def begin(self, call: C, verb: str, argument: int = 0) -> None:
        """Give the order; `inside/supervisor.sh` lists them."""
        ...

    def job(self, call: C, command: str, output: Output) -> CallJob:
        """A job of a call that has not begun."""
        ...

    async def kill(self, call: C) -> None:
        """Kill all processes of a call. Raises `SandboxError` where the supervisor does not manage that."""
        ...

    def close(self, call: C, *, keep_output: bool = False) -> None:
        """Take what was printed and forget the call. What its children go on printing is thrown away, unless kept."""
        ...

    def abandon(self, call: C) -> None:
        """Nobody waits for the call any more: kill it without waiting."""
        ...

    def fail(self, reason: str) -> SandboxError:
        """The sandbox is lost: tell all who wait, and all who come later."""
        ...


class SupervisedSandbox(Sandbox):
    """A sandbox whose inside runs a supervisor; an adapter starts and stops it."""

    _running: Supervising[Any] | None = None

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._turn = asyncio.Lock()

    async def exec(
        self, command: str, *, timeout: float, workdir: str = "", stdin: bytes = b"", stateful: bool = True
    ) -> ExecResult:
        text = _records(workdir, command)
        if not stateful:
            return await self._exec("y", text, stdin, timeout)
        async with self._turn:
            return await self._exec("x", text, stdin, timeout)

    async def spawn(self, command: str, *, workdir: str = "") -> Job:
        text = _records(workdir, command)
        supervisor = self._supervisor
        output = Output()
        call = supervisor.open(output)
        try:
            await supervisor.place(call, ".sh", text)
            job = supervisor.job(call, command, output)
            supervisor.begin(call, "j", 1)
            async with asyncio.timeout(START_SECONDS):
                job.pid = await call.launched
        except BaseException as error:
            supervisor.abandon(call)
            if isinstance(error, OSError):  # TimeoutError is one
                raise supervisor.fail(f"A job could not be started: {error or 'no answer'}.") from error
            raise
        call.ended.add_done_callback(lambda _: supervisor.close(call, keep_output=True))
        return job

    async def read(self, path: str, limit: int) -> bytes:
        return await self._file("g", limit, path, Output(limit, 0))

    async def write(self, path: str, data: bytes) -> None:
        await self._file("p", len(data), path, Output(), data)

    @property
    def _supervisor(self) -> Supervising[Any]:
        if self._running is None:
            raise SandboxError("The sandbox was not started.")
        return self._running

    async def _exec(self, verb: str, text: bytes, stdin: bytes, timeout: float) -> ExecResult:
        started = time.monotonic()
        supervisor = self._supervisor
        output = Output()
        call = supervisor.open(output)
        try:
            await supervisor.place(call, ".sh", text)
            if stdin:
                await supervisor.place(call, ".in", stdin)
            supervisor.begin(call, verb, int(bool(stdin)))
            code = await call.result(timeout)
            if code is None:
                await supervisor.kill(call)
        except BaseException:
            supervisor.abandon(call)
            raise
        supervisor.close(call)
        kept, dropped = output.collect()
        vanished = call.note and f"The directory {call.note} no longer exists; the command ran in {self.workspace}."
        return ExecResult(
            output=kept,
            exit_code=124 if code is None else code,
            dropped=dropped,
            timed_out=code is None,
            note=" ".join(filter(None, (call.remark, vanished))),
            seconds=time.monotonic() - started,
        )

    async def _file(self, verb: str, argument: int, path: str, output: Output, data: bytes | None = None) -> bytes:
        supervisor = self._supervisor
        call = supervisor.open(output)
        call.trusted = True
        try:
            await supervisor.place(call, ".sh", _records(path))
            if data is not None:
                await supervisor.place(call, ".in", data)
            supervisor.begin(call, verb, argument)
            if await call.result(FILE_SECONDS) is None:
                await supervisor.kill(call)
        except BaseException:
            supervisor.abandon(call)
            raise
        supervisor.close(call)
        kept, _ = output.collect()
        call.raise_for(path, b"" if data is None else kept)
        return kept


def _records(*texts: str) -> bytes:
    """Texts with a NUL after each. Raises `ValueError` where one holds a NUL itself."""
    if any("\0" in text for text in texts):
        raise ValueError("A NUL byte can be in no command and no path.")
    return b"".join(text.encode("utf-8", "replace") + b"\0" for text in texts)
