"""The host's end of supervisors that are reached by byte streams: `inside/lane.sh` and `inside/job.sh`.

A lane runs one call at a time. The first one is usually enough; another is opened where a call would have to wait for a
long one, or where children of an earlier call still write into the lane. A background job has a stream of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Coroutine

from gristmill.errors import SandboxError
from gristmill.sandbox.calls import CallJob
from gristmill.sandbox.inside import StreamInside, stream_script
from gristmill.sandbox.output import Output
from gristmill.sandbox.stream import Connect, Receiver
from gristmill.sandbox.stream_calls import JobStream, Lane, StreamCall, StreamJob
from gristmill.sandbox.supervised import START_SECONDS
from gristmill.sandbox.supervisor import KILL_SECONDS

BUSY_SECONDS = 0.03  # that a call waits for a busy lane before another is opened
MOST_LANES = 8
STATES = 16  # the states of the shell that are kept inside
TEXT_BYTES = 1 << 16  # data that is longer or holds a NUL is taken in by a program, not by the shell itself
BOOT = 'LC_ALL=C IFS= read -rN "$1" script; eval "$script"'
CLEARED = "The limit on processes left no room to start one, so everything that was left running was ended."
RENEWALS = (0.05, 0.2, 0.8)  # seconds after each try to start another first program: what killed one may kill the next
KILLED = 137  # exit code of what ended without saying how


class LaneSupervisor:
    """Started once, stopped once.

    Args:
        connect: opens a stream to a program inside that it starts; without a command line, to the sandbox's first one,
            whose is `first_argv`. Raises `SandboxError`.
        inside: where things are inside.
        mortal: whether the first program can be killed from inside; then another one takes its place.
    """

    def __init__(self, connect: Connect, inside: StreamInside, *, mortal: bool = False) -> None:
        self.lost = "The sandbox was not started."  # why no call can be made; empty while it works
        self._connect = connect
        self._inside = inside
        self._mortal = mortal
        self._unkilled: list[StreamCall] = []  # calls to be killed when there is a first program again
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._states = itertools.count(1)
        self._state = 0  # number of the newest state of the shell
        self._first: Lane | None = None
        self._lanes: list[Lane] = []  # those that take calls
        self._opening = 0
        self._waiting: deque[asyncio.Future[Lane]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, StreamCall] = {}
        self._killing: dict[int, asyncio.Future[None]] = {}
        self._clearing: dict[int, asyncio.Future[bool]] = {}
        self._streams: set[Receiver] = set()

    @property
    def first_argv(self) -> list[str]:
        """The command line of the sandbox's first program."""
        return self._argv(self._script("lane", first=1))

    async def start(self) -> None:
        """Connect to the first program and wait until it is ready. Raises `SandboxError`."""
        lane = self._first = Lane(self._token, self._reported, self._ended)
        await self._ready(lane, [], self._script("lane", first=1))
        self.lost = ""
        self._lanes.append(lane)

    def stop(self) -> None:
        """Close all streams. Whoever waits for a call gets a `SandboxError`."""
        self.fail("The sandbox was stopped.")
        for call in tuple(self._calls.values()):
            self.close(call)
        for receiver in tuple(self._streams):
            if receiver.stream:
                receiver.stream.close()
        self._lanes.clear()

    def open(self, output: Output) -> StreamCall:
        """A new call; nothing has been ordered yet. It must be closed or abandoned."""
        if self.lost:
            raise SandboxError(self.lost)
        call = StreamCall(next(self._numbers), output, self._ask)
        self._calls[call.id] = call
        return call

    async def place(self, call: StreamCall, suffix: str, data: bytes) -> None:
        """Hand over what a call needs."""
        if suffix == ".sh":
            call.texts = data.split(b"\0")[:-1]
        else:
            call.data = data

    def begin(self, call: StreamCall, verb: str, argument: int = 0) -> None:
        """Give the order, as soon as a lane is free."""
        call.verb, call.argument = verb, argument
        idle = next((lane for lane in self._lanes if lane.idle), None)
        if verb == "j":
            self._later(self._begin_job(call))
        elif idle:
            self._send(call, idle)
        else:
            self._later(self._begin_when_free(call))

    def job(self, call: StreamCall, command: str, output: Output) -> CallJob:
        """A job of a call that has not begun."""
        call.job = StreamJob(call, command, output, self.kill)
        return call.job

    async def kill(self, call: StreamCall) -> None:
        """Kill all processes of a call. Raises `SandboxError` where that cannot be done."""
        if not call.begun:
            return
        if self.lost:
            raise SandboxError(self.lost)
        killed = self._killing.setdefault(call.id, asyncio.get_running_loop().create_future())
        self._order_kill(call)
        await asyncio.wait((killed,), timeout=KILL_SECONDS)
        if not killed.done():
            raise self.fail("The sandbox does not answer any more.")
        killed.result()

    def close(self, call: StreamCall, *, keep_output: bool = False) -> None:
        """Forget the call. What its children go on printing is thrown away, unless kept."""
        self._calls.pop(call.id, None)
        call.close()
        if not keep_output:
            call.pipe.drop()

    def abandon(self, call: StreamCall) -> None:
        """Nobody waits for the call any more: kill it without waiting."""
        ended = call.ended  # cancelled where the one who awaited it was
        if call.begun and (not ended.done() or ended.cancelled() or (not ended.exception() and ended.result() is None)):
            self._order_kill(call)
        self.close(call)

    def fail(self, reason: str) -> SandboxError:
        """The sandbox is lost: tell all who wait, and all who come later."""
        self.lost = self.lost or reason
        error = SandboxError(reason)
        for call in tuple(self._calls.values()):
            call.fail(error)
        for killed in self._killing.values():
            killed.set_exception(error)
            killed.exception()  # whether or not someone waits
        self._killing.clear()
        for task in self._tasks:
            task.cancel()
        return error

    # Lanes.

    async def _ready(self, lane: Lane, argv: list[str], script: bytes) -> None:
        """Connect a lane and wait until it takes orders."""
        self._streams.add(lane)
        try:
            lane.stream = await self._connect(argv, lane)
            lane.stream.write(script)
            async with asyncio.timeout(START_SECONDS):
                await lane.ready
        except BaseException as error:
            self._streams.discard(lane)
            if lane.stream:
                lane.stream.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"The sandbox did not answer within {START_SECONDS:g} s.") from None
            raise

    async def _begin_when_free(self, call: StreamCall) -> None:
        """Wait for a lane, and open another one where that takes long."""
        waiting: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if self._lanes:
            await asyncio.wait((waiting,), timeout=BUSY_SECONDS)
        # Without a first one there will be another soon.
        if not waiting.done() and self._first and len(self._lanes) + self._opening < MOST_LANES:
            self._opening += 1
            try:
                await self._open_lane(call)
            except SandboxError as error:
                call.fail(error)
                if waiting.done():
                    self._free(waiting.result())
                waiting.cancel()
                return
            finally:
                self._opening -= 1
        lane = await waiting
        lane.reserved = False
        if call.id in self._calls and not call.ended.done():
            self._send(call, lane)
        else:
            self._free(lane)

    async def _open_lane(self, call: StreamCall) -> None:
        script = self._script("lane", first="")
        for cleared in (False, True):
            lane = Lane(self._token, self._reported, self._ended)
            try:
                await self._ready(lane, self._argv(script), script)
                break
            except SandboxError:
                if cleared or not self._inside.limited or not await self._make_room(call):
                    raise
        self._lanes.append(lane)
        self._free(lane)

    async def _make_room(self, call: StreamCall) -> bool:
        """End all that is left running where there is no room to start a process; whether that was so."""
        assert self._first is not None
        clearing = self._clearing[call.id] = asyncio.get_running_loop().create_future()
        self._first.order(f"m {call.id}")
        await asyncio.wait((clearing,), timeout=KILL_SECONDS)
        self._clearing.pop(call.id, None)
        return clearing.done() and clearing.result()

    def _free(self, lane: Lane) -> None:
        """Give a lane to whoever has waited longest."""
        lane.call, lane.reserved = None, False
        lane.show(False)
        while self._waiting and lane in self._lanes and not lane.reserved:
            waiting = self._waiting.popleft()
            if not waiting.done():
                lane.reserved = True
                waiting.set_result(lane)

    def _send(self, call: StreamCall, lane: Lane) -> None:
        lane.call, call.lane = call, lane
        call.begun = True
        data, texts = call.data, call.texts
        kind = "b" if len(data) > TEXT_BYTES or b"\0" in data else "t"
        sizes = " ".join(str(len(text)) for text in texts)
        if call.verb == "g":
            line = f"g {call.id} {sizes} {call.argument} {self._state}"
        else:
            line = f"{call.verb} {call.id} {sizes} {len(data)} {kind} {self._state}"
        if call.verb == "x":
            call.state = next(n for n in self._states if (n - self._state) % STATES)
            line += f" {call.state}"
        if call.verb == "p":
            call.runs()  # which it does not report
        lane.order(line, *texts, data)

    def _reported(self, lane: Lane, line: str) -> None:
        """Reports come from inside and may be anything: nonsense is ignored."""
        verb, _, rest = line.partition(" ")
        number, _, value = rest.partition(" ")
        if verb == "r" and not lane.ready.done():
            lane.ready.set_result(None)
        elif verb == "e":
            lane.refuse(rest)
        elif number.isdecimal():
            with contextlib.suppress(ValueError):
                self._call_reported(lane, verb, int(number), value)

    def _call_reported(self, lane: Lane, verb: str, number: int, value: str) -> None:
        call = lane.call if lane.call and lane.call.id == number else None
        if verb == "k" and (killed := self._killing.pop(number, None)):
            killed.set_result(None)
        elif verb == "m":
            self._cleared(number, bool(value))
        if call is None:
            other = self._calls.get(number)
            if other and other.job and verb in ("k", "d"):
                other.end(int(value.split()[0]))
        elif verb == "s":
            lane.show(True)
            call.runs()
        elif verb == "n":
            call.note = value
        elif verb == "b":
            # Children of an earlier call hold it; what they print is thrown away.
            self._lanes.remove(lane)
            lane.call, call.lane, call.begun = None, None, False
            self._later(self._begin_when_free(call))
        elif verb == "f":
            call.refused = int(value)
            call.end(1)
            self._free(lane)
        elif verb in ("d", "k"):
            code, _, kept = value.partition(" ")
            if kept and call.state and call.id in self._calls and not call.ended.done():
                self._state = call.state
            call.end(int(code))
            self._free(lane)

    def _cleared(self, number: int, needed: bool) -> None:
        """Everything inside but the first lane was ended, if that was needed."""
        if needed and number in self._calls:
            self._calls[number].remark = CLEARED
        if (clearing := self._clearing.get(number)) and not clearing.done():
            clearing.set_result(needed)

    def _ended(self, lane: Lane) -> None:
        self._streams.discard(lane)
        if lane is self._first and (self.lost or not self._mortal):
            if not self.lost:
                self.fail("The sandbox has ended.")
            return
        # A command may kill a lane; then it has killed itself, or we find out what is left.
        if lane in self._lanes:
            self._lanes.remove(lane)
        if lane is self._first:
            self._first = None
            self._unkilled += [self._calls[number] for number in self._killing if number in self._calls]
            self._later(self._renew())
        call, lane.call = lane.call, None
        if call:
            call.lane = None
            if call.id in self._calls and not call.ended.done() and not lane.wanted and not lane.torn:
                # An earlier command's killing spree hit the lane before this one ran.
                call.begun = False
                self._later(self._begin_when_free(call))
                return
            self._order_kill(call)
            call.end(KILLED)

    async def _renew(self) -> None:
        """Put another program in the place of the first one."""
        script = self._script("lane", first="")
        for pause in RENEWALS:
            lane = Lane(self._token, self._reported, self._ended)
            with contextlib.suppress(SandboxError):
                await self._ready(lane, self._argv(script), script)
                if not lane.over:
                    break
            await asyncio.sleep(pause)
        else:
            self.fail("The sandbox has ended.")
            return
        self._first = lane
        self._lanes.append(lane)
        unkilled, self._unkilled = self._unkilled, []
        for call in unkilled:
            self._order_kill(call)
        self._free(lane)

    # Jobs.

    async def _begin_job(self, call: StreamCall) -> None:
        receiver = JobStream(self._token, call)
        directory, command = call.texts
        sizes = {"directory": len(directory), "command": len(command)}
        script = self._script("job", id=call.id, **{"from": self._state}, **sizes)
        self._streams.add(receiver)
        try:
            stream = receiver.stream = await self._connect(self._argv(script), receiver)
        except SandboxError as error:
            self._streams.discard(receiver)
            call.fail(error)
            return
        if call.job and call.id in self._calls:
            call.begun, call.job.stream = True, stream
            stream.write(script + directory + command)
        else:
            stream.close()

    def _script(self, name: str, **settings: str | int) -> bytes:
        return stream_script(self._inside, self._token, name, settings).encode("utf-8", "surrogateescape")

    def _argv(self, script: bytes) -> list[str]:
        """Whose stdin begins with a script. It is in no command line, where each list of processes would show it."""
        return [*self._inside.shell, "--norc", "--noprofile", "-c", BOOT, "gristmill", str(len(script))]

    def _order_kill(self, call: StreamCall) -> None:
        lane = call.lane or self._first
        if lane:
            lane.order(f"k {call.id} {call.job.pid or '' if call.job else ''}")
        else:
            self._unkilled.append(call)

    def _ask(self, call: StreamCall) -> None:
        """Find out about a call that says nothing."""
        if call.lane:
            call.lane.order(f"w {call.id}")
        elif call.job and call.job.pid and self._first:
            self._first.order(f"w {call.id} {call.job.pid}")

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
