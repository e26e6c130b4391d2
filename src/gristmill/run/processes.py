"""Worker processes, seen from the runner: the executor that gives leases to them. Their own side is `serve`.

A worker that dies or stops answering loses its leases; they are given out again, at most `MAX_DEATHS` times each, the
last time to a worker of their own beside the others, so that a session that kills its worker takes no other one with
it. A worker whose runner is gone ends its sessions and itself: the closed socket tells it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import IO

import msgspec

from gristmill.errors import GristmillError, SetupError, StoreError
from gristmill.run import frames
from gristmill.run.budget import Budget
from gristmill.session.spec import Finished, SessionSpec
from gristmill.types import Outcome

MAX_DEATHS = 3  # times that a session may lose its worker
MAX_FAILED_STARTS = 3  # workers in a row that ended before they were ready
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 60.0  # without a frame a worker is taken for dead
START_SECONDS = 180.0  # the same for one that is not ready yet: a crowded machine or disk starts slowly
STOP_SECONDS = 30.0  # the longest that a worker may take to end


@dataclass
class _Lease:
    id: int
    spec: SessionSpec
    deaths: int = 0


@dataclass
class _Worker:
    """The runner's side of one worker process."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    errors: IO[bytes]
    alone: bool = False  # made for one lease, and ended after it
    leases: dict[int, _Lease] = field(default_factory=dict)
    reserved: int = 0
    ready: bool = False
    leaving: bool = False  # gets nothing more: it was told to end, or is dead
    fault: str = ""  # why it was given up, where the process itself says nothing
    heard: float = field(default_factory=time.monotonic)
    limit: int = 0
    refused: int = 0

    def send(self, frame: frames.Frame) -> None:
        if not self.writer.is_closing():
            self.writer.write(frames.encode(frame))


class ProcessExecutor:
    """Sessions in worker processes.

    Args:
        begin: what each worker gets first; `slots` is the most sessions of one worker.
        workers: processes.
        concurrency: sessions in flight over all workers.
        command: the argv that starts a worker; the number of its socket is appended.
        lost: makes the failure row of a session that lost its worker too often.
        budget: asked for reservations.
        environment: of the workers.
    """

    def __init__(
        self,
        begin: frames.Begin,
        *,
        workers: int,
        concurrency: int,
        command: list[str],
        lost: Callable[[SessionSpec, str], Finished],
        budget: Budget,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._begin = begin
        self._count = workers
        self._concurrency = concurrency
        self._command = command
        self._lost = lost
        self._budget = budget
        self._environment = environment
        self._workers: list[_Worker] = []
        self._listeners: set[asyncio.Task[None]] = set()
        self._answers: set[asyncio.Task[None]] = set()
        self._results: asyncio.Queue[Finished | GristmillError | None] = asyncio.Queue()
        self._again: deque[_Lease] = deque()
        self._suspects: deque[_Lease] = deque()  # have lost all but one of the workers that they may lose
        self._held = False
        self._failed_starts = 0
        self._refused_before = 0  # of workers that are gone
        self.crashes = 0  # workers that were killed or broke off: their sandboxes may have left something
        self._stopping: Outcome | None = None
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Sessions running now."""
        return sum(len(worker.leases) for worker in self._workers)

    @property
    def limit(self) -> int:
        """How many model requests the endpoint takes at present, over all workers; 0 where unknown."""
        return sum(worker.limit for worker in self._workers)

    @property
    def refused(self) -> int:
        """How many model requests the endpoint refused because it was asked too much at once, over all workers."""
        return self._refused_before + sum(worker.refused for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [worker.process.pid for worker in self._workers]

    async def run(
        self, specs: Iterator[SessionSpec], started: Callable[[SessionSpec], None]
    ) -> AsyncIterator[Finished]:
        """See `Executor.run`. Raises `SetupError` where a worker cannot be made."""
        watch = asyncio.create_task(self._watch())
        leases = 0
        try:
            while True:
                while self._room():
                    if self._suspects and (lonely := await self._start_alone()) is not None:
                        if self._suspects:  # `stop` may have come meanwhile
                            self._give(lonely, self._suspects.popleft())
                        continue
                    worker = await self._free_worker()
                    if worker is None:
                        break
                    if self._again:
                        self._give(worker, self._again.popleft())
                        continue
                    spec = None if self._held else next(specs, None)
                    if spec is None:
                        self._held = True
                        break
                    leases += 1
                    started(spec)
                    self._give(worker, _Lease(leases, spec))
                if self._held and not self.in_flight and not self._owed and self._results.empty():
                    return
                result = await self._results.get()
                if isinstance(result, GristmillError):
                    raise result
                if result is not None:
                    yield result
        finally:
            watch.cancel()

    @property
    def _owed(self) -> bool:
        """Whether leases of dead workers wait for another one."""
        return bool(self._again or self._suspects)

    def _room(self) -> bool:
        """Whether one more session may start."""
        self._held = self._held or bool(self._budget.spent_reason)
        if self._stopping is not None or (self._held and not self._owed):
            return False
        # In a pause one session goes on asking; where none is left to ask, the next one does.
        return self.in_flight < self._concurrency and not (self._budget.paused and self.in_flight)

    def _give(self, worker: _Worker, lease: _Lease) -> None:
        worker.leases[lease.id] = lease
        try:
            worker.send(frames.Lease(lease.id, lease.spec))
        except OverflowError as error:  # an integer beyond 64 bits in a part of its prompt
            self._ended(worker, lease.id, self._lost(lease.spec, f"it cannot be given to a worker: {error}"))

    async def _free_worker(self) -> _Worker | None:
        """The worker with the most room; new processes are started only while there is something for them to do."""
        if self._held and not self._again:
            return None
        usual = [worker for worker in self._workers if not worker.alone and not worker.leaving]
        free = [worker for worker in usual if len(worker.leases) < self._begin.slots]
        best = min(free, key=lambda worker: len(worker.leases), default=None)
        if (best is None or best.leases) and len(usual) < self._count:
            best = await self._start_worker()
        return best

    async def _start_alone(self) -> _Worker | None:
        """A worker for one lease; None where as many as there are usual ones run already."""
        if sum(worker.alone for worker in self._workers) >= self._count:
            return None
        return await self._start_worker(alone=True)

    async def _start_worker(self, *, alone: bool = False) -> _Worker:
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: ASYNC220 - a fork takes less than a millisecond
                    [*self._command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    env=self._environment,
                )
        except OSError as error:
            ours.close()
            errors.close()
            raise SetupError(f"A worker process cannot be started: {error}.", "Give fewer --num_workers.") from error
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        worker = _Worker(process, reader, writer, errors, alone)
        worker.send(self._begin)
        self._workers.append(worker)
        task = asyncio.create_task(self._listen(worker))
        self._listeners.add(task)
        task.add_done_callback(self._listeners.discard)
        return worker

    async def _listen(self, worker: _Worker) -> None:
        try:
            while (frame := await frames.read_for_runner(worker.reader)) is not None:
                worker.heard = time.monotonic()
                await self._take(worker, frame)
        except (StoreError, msgspec.MsgspecError) as error:
            worker.fault = f"it said what is no frame: {error}"
        await self._worker_died(worker)

    async def _take(self, worker: _Worker, frame: frames.ToRunner) -> None:
        match frame:
            case frames.Done(id=number, finished=finished):
                self._ended(worker, number, finished)
            case frames.Lost(id=number):
                self._ended(worker, number, None)
            case frames.Reserve(id=number):
                self._answer(worker, number, self._reserve(worker))
            case frames.OutOfCredit(id=number, message=message):
                self._answer(worker, number, self._budget.out_of_credit(message))
            case frames.Settle(usage=usage):
                worker.reserved -= 1
                await self._budget.settle(usage)
            case frames.CreditBack():
                self._budget.credit_back()
            case frames.Beat(limit=limit, refused=refused):
                worker.limit, worker.refused = limit, refused
            case frames.Ready():
                worker.ready = True
                self._failed_starts = 0
            case frames.Broken(message=message, mend=mend):
                self._results.put_nowait(SetupError(message, mend))

    def _ended(self, worker: _Worker, number: int, finished: Finished | None) -> None:
        lease = worker.leases.pop(number, None)
        if lease is None:
            return
        if finished is None:
            self._give_again(lease, f"its worker process broke off {MAX_DEATHS} times; a tool may have ended it")
        if finished is not None and finished.state == "kept":
            self._budget.credit_back()
        if worker.alone:
            worker.leaving = True
            worker.send(frames.Finish())
        self._results.put_nowait(finished)

    async def _reserve(self, worker: _Worker) -> str:
        refusal = await self._budget.reserve()
        if refusal:
            return refusal
        if worker.leaving:  # it died while it waited
            await self._budget.settle(None)
        else:
            worker.reserved += 1
        return ""

    def _answer(self, worker: _Worker, number: int, asked: Coroutine[None, None, str]) -> None:
        async def answer() -> None:
            worker.send(frames.Granted(number, await asked))

        task = asyncio.create_task(answer())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _worker_died(self, worker: _Worker) -> None:
        # Its leases count as in flight until they are given out again or given up, else the run would end without them.
        worker.leaving = True
        worker.writer.close()
        status = await asyncio.to_thread(_reap, worker.process)
        self.crashes += status != 0
        # What a dead worker had reserved is given back as if it gave no answer.
        for _ in range(worker.reserved):
            await self._budget.settle(None)
        worker.reserved = 0
        said = worker.fault or _last_words(worker.errors)
        if not worker.ready and self._stopping is None and not self._closed:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._results.put_nowait(SetupError(f"Worker processes do not start (exit status {status}).", said))
        for lease in worker.leases.values():
            # A worker that was never ready did not run it.
            reason = f"its worker process died {MAX_DEATHS} times (exit status {status}): {said}"
            self._give_again(lease, reason.rstrip(": "), worker.ready)
        worker.leases.clear()
        worker.errors.close()
        self._workers.remove(worker)
        self._refused_before += worker.refused
        self._results.put_nowait(None)

    def _give_again(self, lease: _Lease, reason: str, deaths: int = 1) -> None:
        """Let a lease that lost its worker wait for another one, or give it up for this reason."""
        if self._stopping is not None or self._closed:
            return  # owed, and found so on resume
        lease.deaths += deaths
        if lease.deaths >= MAX_DEATHS:
            self._results.put_nowait(self._lost(lease.spec, reason))
        elif lease.deaths == MAX_DEATHS - 1:
            self._suspects.append(lease)
        else:
            self._again.append(lease)

    async def _watch(self) -> None:
        """Kill a worker that has stopped answering; its closed socket does the rest."""
        now = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            before, now = now, time.monotonic()
            for worker in self._workers:
                if now - before > SILENCE_SECONDS / 2:
                    worker.heard = now  # we were stopped ourselves (Ctrl+Z), and could hear nothing
                elif now - worker.heard > (longest := SILENCE_SECONDS if worker.ready else START_SECONDS):
                    worker.fault = f"it did not answer for {longest:.0f} s; a tool blocked it, or the machine"
                    worker.process.kill()

    def wake(self) -> None:
        """Look again whether something may start: a pause has ended."""
        self._results.put_nowait(None)

    def hold(self) -> None:
        """See `Executor.hold`."""
        self._held = True

    def stop(self, outcome: Outcome) -> None:
        """See `Executor.stop`."""
        self._held = True
        self._stopping = outcome
        self._again.clear()
        self._suspects.clear()
        for worker in self._workers:
            if worker.ready:
                worker.send(frames.Stop(outcome.value))
            else:  # it runs nothing yet
                worker.process.kill()
        self._results.put_nowait(None)

    async def close(self) -> None:
        """See `Executor.close`."""
        self._closed = True
        for answer in self._answers:
            answer.cancel()
        for worker in self._workers:
            if worker.leases:  # an error ended the run: nobody takes what they would still give
                worker.send(frames.Stop(Outcome.INTERRUPTED))
            worker.send(frames.Finish())
        # Workers that do not end in time are killed; their sandboxes die with them.
        _, late = await asyncio.wait(self._listeners, timeout=STOP_SECONDS) if self._listeners else (set(), set())
        for worker in self._workers:
            worker.process.kill()
        if late:
            await asyncio.wait(late, timeout=5)


def _reap(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _last_words(errors: IO[bytes]) -> str:
    """The last line that a dead worker wrote, without control characters."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 2000))
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return "".join(c for c in lines[-1] if c.isprintable())[:300] if lines else ""
