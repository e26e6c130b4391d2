"""Where sessions run: the protocol, and the executor of the runner's own process (tests, scripts, small runs)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from gristmill.run.budget import Budget
from gristmill.run.worker import Kit, WorkerLoop
from gristmill.session.record import BudgetSpent
from gristmill.session.spec import Finished, SessionSpec
from gristmill.types import Outcome, Usage


class Executor(Protocol):
    """Runs sessions, as many at a time as it may.

    Contract: every spec that `run` took from its iterator comes back exactly once, as a `Finished`, unless the executor
    was stopped before anything of it could be kept. A spec is taken only when a session can start.
    """

    def run(self, specs: Iterator[SessionSpec], started: Callable[[SessionSpec], None]) -> AsyncIterator[Finished]:
        """Run all specs; yields in order of completion. `started` is called as each session begins."""
        ...

    def hold(self) -> None:
        """Take no more specs; what runs goes on."""
        ...

    def stop(self, outcome: Outcome) -> None:
        """Take no more specs and end what runs, recorded with this outcome."""
        ...

    async def close(self) -> None:
        """End everything and give back processes and connections; idempotent."""
        ...

    def wake(self) -> None:
        """Look again whether something may start: a pause has ended."""
        ...

    @property
    def in_flight(self) -> int:
        """Sessions running now."""
        ...

    @property
    def limit(self) -> int:
        """How many model requests the endpoint takes at present; 0 where unknown."""
        ...

    @property
    def refused(self) -> int:
        """How many model requests the endpoint has refused so far because it was asked too much at once."""
        ...


class LocalGate:
    """The budget as sessions of the runner's own process see it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._settling: set[asyncio.Task[None]] = set()

    async def reserve(self) -> None:
        """See `session.record.Gate`."""
        if self._budget.limited and (refusal := await self._budget.reserve()):
            raise BudgetSpent(refusal)

    def settle(self, usage: Usage | None) -> None:
        """See `session.record.Gate`."""
        if self._budget.limited:
            task = asyncio.create_task(self._budget.settle(usage))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
        if usage is not None:
            self._budget.credit_back()

    async def out_of_credit(self, message: str) -> None:
        """See `session.record.Gate`."""
        if refusal := await self._budget.out_of_credit(message):
            raise BudgetSpent(refusal)


class LocalExecutor:
    """Sessions in this process and event loop."""

    def __init__(self, kit: Kit, concurrency: int, budget: Budget) -> None:
        self._kit = kit
        self._budget = budget
        self._concurrency = concurrency
        self._held = False
        self._results: asyncio.Queue[Finished | None] = asyncio.Queue()
        self._loop = WorkerLoop(kit, lambda lease, finished: self._results.put_nowait(finished))
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Sessions running now."""
        return self._loop.in_flight

    @property
    def limit(self) -> int:
        """See `Executor.limit`."""
        return self._kit.load()[0]

    @property
    def refused(self) -> int:
        """See `Executor.refused`."""
        return self._kit.load()[1]

    def wake(self) -> None:
        """See `Executor.wake`."""
        self._results.put_nowait(None)

    async def run(
        self, specs: Iterator[SessionSpec], started: Callable[[SessionSpec], None]
    ) -> AsyncIterator[Finished]:
        """See `Executor.run`."""
        leases = 0
        while True:
            while self._room():
                spec = next(specs, None)
                if spec is None:
                    self._held = True
                    break
                leases += 1
                self._loop.start(leases, spec)
                started(spec)
            if self._held and not self._loop.in_flight and self._results.empty():
                return
            finished = await self._results.get()
            if finished is not None:
                yield finished

    def _room(self) -> bool:
        self._held = self._held or bool(self._budget.spent_reason)
        # In a pause one session goes on asking; where none is left to ask, the next one does.
        paused = self._budget.paused and self.in_flight
        return not self._held and not paused and self.in_flight < self._concurrency

    def hold(self) -> None:
        """See `Executor.hold`."""
        self._held = True

    def stop(self, outcome: Outcome) -> None:
        """See `Executor.stop`."""
        self._held = True
        self._loop.stop(outcome)
        self.wake()

    async def close(self) -> None:
        """See `Executor.close`."""
        if not self._closed:
            self._closed = True
            await self._loop.abandon()
            await self._kit.close()
