"""The host's end of `inside/supervisor.sh`: orders go down its stdin, reports come by a FIFO."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence

from gristmill.errors import SandboxError
from gristmill.sandbox.calls import Call, CallJob, ShellJob
from gristmill.sandbox.cgroups import Group
from gristmill.sandbox.output import Fifo, Output
from gristmill.sandbox.process import Child, spawn
from gristmill.sandbox.reaper import MARK
from gristmill.sandbox.supervised import START_SECONDS

HELP_SECONDS = 1.0  # until the supervisor gets help with killing a call
KILL_SECONDS = 5.0  # until a call must have been killed
GRACE_SECONDS = 2.0  # for each step of stopping
REPORT_BYTES = 1 << 16  # that may be reported beyond what the calls made are good for
CALL_BYTES = 1 << 10  # of reports that one call is good for
THREAD_BYTES = 1 << 20  # more than this is written to disk beside the event loop
CLEARED = "There was no room to start a process, so what earlier commands had left running was ended."


class Supervisor:
    """Started once, stopped once.

    Args:
        io: the host's path of the directory that it shares with the inside.
        mark: what the value of `SBX_CALL` begins with inside.
        group: what bounds the inside.
    """

    def __init__(self, io: str, mark: str = "", group: Group | None = None) -> None:
        self.io = io
        self._mark = mark
        self._group = group
        self._first = 0
        self.lost = "The sandbox was not started."  # why no order can be given; empty while it works
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._child: Child | None = None
        self._orders = -1
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._killing: dict[int, asyncio.Future[None]] = {}
        self._pipes: set[Fifo] = set()
        self._partial = b""
        self._due = REPORT_BYTES

    async def start(self, argv: Sequence[str]) -> None:
        """Start the program that runs `init` inside, and wait until it is ready. Raises `SandboxError`."""
        log = f"{self.io}/log"
        try:
            self._pipes.add(Fifo(f"{self.io}/reports", self._report, lasting=True))
            orders, self._orders = os.pipe()
            os.set_blocking(self._orders, False)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._child = spawn(argv, env={}, stdin=orders, output=output)
            finally:
                os.close(output)
                os.close(orders)
        except OSError as error:
            raise SandboxError(f"The sandbox could not be started: {error}.") from error
        self._child.exited.add_done_callback(lambda _: self._exited(log))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._ready
        except TimeoutError:
            raise self.fail(f"The sandbox did not start within {START_SECONDS:g} s.") from None

    @property
    def pid(self) -> int:
        """The number of the program that was started."""
        assert self._child is not None
        return self._child.pid

    async def enter_group(self, first: int) -> None:
        """Have the group bound what is inside from now on; `first` is its first process. Raises `SandboxError`."""
        self._first = first
        if self._group is not None:
            try:
                await asyncio.to_thread(self._group.take, first)
            except OSError as error:
                raise self.fail(f"The sandbox could not be given its limits: {error}.") from error

    async def stop(self) -> None:
        """Let it end, or end it. Whoever waits for a call gets a `SandboxError`."""
        self._hang_up()
        if self._group and self._group.crowded():
            await asyncio.to_thread(self._group.end, self._first)
        child = self._child
        if child and not await child.wait(GRACE_SECONDS):
            child.kill_children()
            if not await child.wait(GRACE_SECONDS):
                child.kill()
                await child.wait(GRACE_SECONDS)

    def stop_now(self) -> None:
        """The same without the event loop, for a process that is about to end."""
        self._hang_up()
        child = self._child
        if child and not child.wait_now(GRACE_SECONDS / 2):
            child.kill_children()
            if not child.wait_now(GRACE_SECONDS / 2):
                child.kill()
                child.wait_now(GRACE_SECONDS)

    def order(self, line: str) -> None:
        """Tell the supervisor to do something. Raises `SandboxError` where it cannot be told."""
        if self.lost:
            raise SandboxError(self.lost)
        try:
            os.write(self._orders, line.encode() + b"\n")
        except OSError as error:
            raise self.fail("The sandbox takes no orders any more.") from error

    def open(self, output: Output) -> Call:
        """A new call; nothing has been ordered yet. It must be closed or abandoned."""
        if self.lost:
            raise SandboxError(self.lost)
        call = Call(next(self._numbers), self.order)
        try:
            pipe = Fifo(f"{self.io}/{call.id}.out", output.add, lambda: self._output_ended(call, pipe))
        except OSError as error:
            call.close()
            raise SandboxError(f"A command could not be started: {error}.") from error
        call.pipe = pipe
        call.files.append(f"{self.io}/{call.id}.out")
        self._pipes.add(pipe)
        self._calls[call.id] = call
        self._due += CALL_BYTES
        return call

    async def place(self, call: Call, suffix: str, data: bytes) -> None:
        """Write one file of a call."""
        if suffix == ".sh":
            await self._make_room(call)
        path = f"{self.io}/{call.id}{suffix}"
        call.files.append(path)
        try:
            if len(data) > THREAD_BYTES:
                await asyncio.to_thread(_write, path, data)
            else:
                _write(path, data)
        except OSError as error:
            raise SandboxError(f"A command could not be handed over: {error}.") from error

    def begin(self, call: Call, verb: str, argument: int = 0) -> None:
        """Give the order."""
        self.order(f"{verb} {call.id} {argument}")

    def job(self, call: Call, command: str, output: Output) -> CallJob:
        """A job of a call that has not begun. Raises `OSError`."""
        stdin = f"{self.io}/{call.id}.in"
        job = ShellJob(call, command, output, stdin, self.kill)
        call.files.append(stdin)
        return job

    async def kill(self, call: Call) -> None:
        """Kill all processes of a call. Raises `SandboxError` where the supervisor does not manage that."""
        await self._make_room(call)  # it forks faster than the supervisor can look
        self.order(f"k {call.id}")
        killed = self._killing.setdefault(call.id, asyncio.get_running_loop().create_future())
        await asyncio.wait((killed,), timeout=KILL_SECONDS if self._group is None else HELP_SECONDS)
        if not killed.done() and self._group is not None:
            # It leaves the supervisor no CPU or memory.
            mark = self._variable(call.id)
            await asyncio.to_thread(self._group.end, self._first, lambda variables: mark in variables)
            await asyncio.wait((killed,), timeout=KILL_SECONDS)
        if not killed.done():
            raise self.fail("The sandbox does not answer any more.")
        killed.result()

    def close(self, call: Call, *, keep_output: bool = False) -> None:
        """Take what was printed and forget the call. What its children go on printing is thrown away, unless kept."""
        if self._calls.pop(call.id, None) is None:
            return
        call.close()
        call.pipe.catch_up()
        if self._group and not call.trusted and not keep_output:
            call.remark = f"{call.remark} {self._group.news(timed_out=call.timed_out)}".strip()
        if not keep_output:
            call.pipe.drop()
        for path in call.files:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - on the path of every command

    def abandon(self, call: Call) -> None:
        """Nobody waits for the call any more: kill it without waiting."""
        ended = call.ended  # cancelled where the one who awaited it was
        if not ended.done() or ended.cancelled() or (not ended.exception() and ended.result() is None):
            with contextlib.suppress(SandboxError):
                self.order(f"k {call.id}")
        self.close(call)

    def fail(self, reason: str) -> SandboxError:
        """The sandbox is lost: tell all who wait, and all who come later."""
        self.lost = self.lost or reason
        error = SandboxError(reason)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whether or not someone waits
        for call in tuple(self._calls.values()):
            call.fail(error)
        for killed in self._killing.values():
            killed.set_exception(error)
            killed.exception()
        self._killing.clear()
        return error

    def _hang_up(self) -> None:
        self.fail("The sandbox was stopped.")
        for call in tuple(self._calls.values()):
            self.close(call)
        if self._orders >= 0:
            with contextlib.suppress(OSError):
                os.write(self._orders, b"q\n")
            os.close(self._orders)
            self._orders = -1
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()

    def _exited(self, log: str) -> None:
        said = "it ended at once"
        if self._ready.done():
            news = self._group.news() if self._group else ""
            self.fail(f"The sandbox has ended. {news}".strip())
            return
        with contextlib.suppress(OSError), open(log, "rb") as file:  # noqa: PTH123
            said = file.read(2000).decode(errors="replace").strip() or said
        self.fail(f"The sandbox could not be started: {said}.")

    async def _make_room(self, call: Call) -> None:
        """At the limit on processes, end those of the call and what earlier ones left, so that others can start."""
        group = self._group
        if group is None or not group.crowded():
            return
        others = {self._variable(other) for other in self._calls if other != call.id}
        await asyncio.to_thread(group.end, self._first, others.isdisjoint)
        if others and group.crowded():
            await asyncio.to_thread(group.end, self._first)
        call.remark = CLEARED

    def _variable(self, number: int) -> bytes:
        """What the processes of a call were started with."""
        return f"{MARK}={self._mark}{number}".encode()

    def _output_ended(self, call: Call, pipe: Fifo) -> None:
        self._pipes.discard(pipe)
        call.ask_soon()

    def _report(self, data: bytes) -> None:
        """Reports come from inside and may be anything: nonsense is ignored, a flood ends the sandbox."""
        self._due -= len(data)
        if self._due < 0:
            self.fail("The sandbox floods its reports.")
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        verb, _, rest = line.partition(" ")
        number, _, value = rest.partition(" ")
        if verb == "r":
            if not self._ready.done():
                self.lost = ""
                self._ready.set_result(None)
            return
        if verb == "e":
            self.fail(rest)
            return
        call = self._calls.get(int(number))
        if verb == "k" and (killed := self._killing.pop(int(number), None)):
            killed.set_result(None)
        if call is None:
            return
        if verb in ("d", "k"):
            call.end(int(value) & 255)
        elif verb == "m":
            call.ask_soon()
        elif verb == "u":
            if not call.launched.done():
                call.launched.set_result(int(value) & 0x7FFFFFFF)
        elif verb == "f":
            call.refused = int(value) & 255
            call.end(1)
        elif verb == "b":
            call.remark = CLEARED
        elif verb == "n":
            call.note = value


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)
