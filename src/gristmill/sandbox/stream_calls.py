"""One call, one lane and one job of `lanes.LaneSupervisor`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable

from gristmill.errors import SandboxError
from gristmill.sandbox.calls import Call, CallJob
from gristmill.sandbox.output import Output
from gristmill.sandbox.stream import Receiver, Stream, Tap

SAID_BYTES = 2000
BEGIN_SECONDS = 6.0  # that a call may wait before its time begins all the same


class StreamCall(Call):
    """A call and what was handed over for it."""

    def __init__(self, number: int, output: Output, ask: Callable[[StreamCall], None]) -> None:
        super().__init__(number, lambda _: ask(self))
        self.pipe = self.tap = Tap(output)
        self.texts: list[bytes] = []
        self.data = b""
        self.verb = ""
        self.argument = 0
        self.begun = False  # whether there may be processes of it
        self.state = 0  # number of the state that it leaves, 0 where it leaves none
        self.lane: Lane | None = None
        self.job: StreamJob | None = None
        self._runs = False
        self._on_run: Callable[[], None] | None = None

    def runs(self) -> None:
        """It has been started inside."""
        self._runs = True
        if self._on_run:
            self._on_run()

    async def result(self, timeout: float) -> int | None:
        """As the other kind's, but its time begins when it does: not while it waits for a lane, within bounds."""
        timers: list[asyncio.TimerHandle] = []

        def begin() -> None:
            if len(timers) < 2:
                timers.append(self._loop.call_later(timeout, self.end, None))

        timers.append(self._loop.call_later(BEGIN_SECONDS, begin))
        self._on_run = begin
        if self._runs:
            begin()
        try:
            return await self.ended
        finally:
            self._on_run = None
            for timer in timers:
                timer.cancel()


class Lane(Receiver):
    """One `lane.sh`."""

    def __init__(self, token: str, on_report: Callable[[Lane, str], None], on_end: Callable[[Lane], None]) -> None:
        super().__init__(token)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call: StreamCall | None = None  # which has it
        self.reserved = False  # for one that is about to
        self.torn = False  # whether it ended in a way that may have lost what it said last
        self._showing = False
        self._said = b""  # before it was ready: why it will not be
        self._on_report = on_report
        self._on_end = on_end

    @property
    def idle(self) -> bool:
        """Whether a call can have it at once."""
        return self.call is None and not self.reserved

    @property
    def wanted(self) -> bool:
        return self._showing

    def show(self, showing: bool) -> None:
        """Whether what comes is output of its call."""
        self._showing = showing

    def order(self, line: str, *data: bytes) -> None:
        """Send an order and what belongs to it."""
        if self.stream and not self.over:
            self.stream.write(b"".join((line.encode(), b"\n", *data)))

    def refuse(self, reason: str) -> None:
        """It will not become ready."""
        if not self.ready.done():
            self.ready.set_exception(SandboxError(reason))
            self.ready.exception()  # whether or not someone waits

    def printed(self, data: bytes) -> None:
        if self._showing and self.call:
            self.call.tap.take(data)
        elif not self.ready.done():
            self._said = (self._said + data)[:SAID_BYTES]

    def reported(self, line: str) -> None:
        self._on_report(self, line)

    def ended(self, reason: str) -> None:
        super().ended(reason)
        self.torn = bool(reason)
        reason = reason or self._said.decode(errors="replace").strip() or "it ended at once"
        self.refuse(f"The sandbox could not be started: {reason}.")
        self._on_end(self)


class JobStream(Receiver):
    """One `job.sh`."""

    def __init__(self, token: str, call: StreamCall) -> None:
        super().__init__(token)
        self._call = call

    @property
    def wanted(self) -> bool:
        return self._call.tap.open

    def printed(self, data: bytes) -> None:
        self._call.tap.take(data)

    def reported(self, line: str) -> None:
        verb, _, rest = line.partition(" ")
        value = rest.partition(" ")[2]
        with contextlib.suppress(ValueError):
            if verb == "u" and not self._call.launched.done():
                self._call.launched.set_result(int(value))
            elif verb == "n":
                self._call.note = value
            elif verb == "d":
                self._call.end(int(value))

    def ended(self, reason: str) -> None:
        super().ended(reason)
        if not self._call.launched.done():
            said = reason or self._call.tap.output.collect()[0][:SAID_BYTES].decode(errors="replace").strip()
            self._call.fail(SandboxError(f"A job could not be started: {said or 'it ended at once'}."))
        self._call.end(137)


class StreamJob(CallJob):
    """A job whose stdin is its stream."""

    def __init__(
        self, call: StreamCall, command: str, output: Output, kill: Callable[[StreamCall], Awaitable[None]]
    ) -> None:
        super().__init__(call, command, output, lambda _: kill(call))
        self.stream: Stream | None = None
        self._closed = False
        call.ended.add_done_callback(lambda _: self._hang_up())

    async def write(self, data: bytes) -> None:
        if self._closed or self.exit_code is not None or self.stream is None:
            raise BrokenPipeError(errno.EPIPE, "The job's stdin is closed")
        self.stream.write(data)
        draining = asyncio.ensure_future(self.stream.drain())
        try:
            await asyncio.wait((draining, self._call.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()

    async def close_stdin(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        if not self._closed and self.stream:
            self.stream.write_eof()
        self._closed = True
