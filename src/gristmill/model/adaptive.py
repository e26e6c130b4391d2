"""How many requests an endpoint gets at once: additive increase, multiplicative decrease, one limiter per worker.

It begins low and opens by half with each round of answers until the endpoint first says no (429, 503, 529). Every
refused request was one too many, so each closes it by one, and about a hundred answers without a refusal open it by
one: about one call in a hundred is refused, however many workers ask and however fast the endpoint is. A worker with
more than its share opens more slowly, so the shares of all come near each other. After a collapse it opens fast again
up to half of what it had.

While an endpoint is down, or refuses everything, sessions are not worn out against it: after some failures without an
answer between them nothing is sent for 1, 2, 4, … seconds, or as long as `Retry-After` asks, and then one request at a
time until one is answered.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time

from gristmill.errors import ErrorKind, ModelError
from gristmill.model.base import Load
from gristmill.model.retry import Ticket

FIRST = 16  # requests at once at the beginning, over all workers
STEP_ANSWERS = 100  # answers before a step up,
FEW_ROUNDS = 30  # or fewer, so many for each place, where there are few places,
FAIR_ROUNDS = 2.5  # or more, so many for each place and worker
GROWTH = 1.25  # each step up without a refusal is larger than the one before by this factor
REFUSALS = frozenset({429, 503, 529})  # statuses that mean "too much at once"
DOWN = REFUSALS | {0, 500, 502, 504}  # those of an endpoint that does not work; 0: there was no answer
FEW_FAILURES = 3  # of them, or as many as there are requests under way, are no reason to wait
LONGEST_QUIET = 60.0  # seconds of our own choice, and those that the endpoint may ask for:
LONGEST_ASKED = 300.0


class Limiter:
    """Admits requests of one worker, those of older sessions first, so that sessions end and do not all crawl along.

    `share` is the most that it can have in flight; `peers` is how many workers ask the endpoint.
    """

    def __init__(self, share: int, *, peers: int = 1) -> None:
        self._most = max(1, share)
        self._peers = peers
        self._limit = max(1.0, min(self._most, FIRST / peers))
        self._fast_until = float(self._most)  # below this it opens by half with each round, above it step by step
        self._step = 1.0  # of the next step up
        self._answers = 0  # since the last step up or down
        self._opened = True  # since the last burst of refusals
        self._in_flight = 0
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._entered = itertools.count()
        self._waiting = 0
        self._generation = 0  # counts bursts of refusals
        self._failures = 0  # without an answer between them
        self._pauses = 0  # because of them
        self._quiet_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._calls = 0
        self._refused = 0

    @property
    def load(self) -> Load:
        """What is going on."""
        return Load(
            limit=self._places,
            in_flight=self._in_flight,
            waiting=self._waiting,
            calls=self._calls,
            refused=self._refused,
        )

    async def enter(self, deadline: float | None = None) -> Ticket:
        """Wait for a place; returns a ticket for `leave`. The first deadline goes first, and None before all."""
        if self._waiting or not self._free():
            place = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (deadline or 0.0, next(self._entered), place))
            self._waiting += 1
            self._admit()
            try:
                await place
            except asyncio.CancelledError:
                if place.cancelled():
                    self._waiting -= 1
                else:  # it was given the place in the same moment
                    self._in_flight -= 1
                self._admit()
                raise
        else:
            self._in_flight += 1
        return Ticket(self._generation)

    def leave(self, ticket: Ticket, error: ModelError | None = None, *, answered: bool = True) -> None:
        """Give the place back, with what came of it; `answered` False says nothing (a cancelled request)."""
        full = self._in_flight >= int(self._limit)
        self._in_flight -= 1
        if answered:
            self._calls += 1
            if error is None or error.status not in DOWN or error.kind is not ErrorKind.TRANSIENT:
                self._take_answer(ticket, full)
            else:
                if error.status in REFUSALS:
                    self._close(ticket)
                self._take_failure(error.retry_after)
        self._admit()

    def _take_answer(self, ticket: Ticket, full: bool) -> None:
        if ticket.generation != self._generation:
            return  # accepted before the last refusal: it says nothing of the endpoint as it is now
        self._failures = self._pauses = 0
        if not full:
            return
        if self._limit < self._fast_until:
            self._open(0.5)
            return
        self._answers += 1
        if self._answers >= self._enough():
            self._open(self._step)
            self._step *= GROWTH
            self._answers = 0

    def _enough(self) -> float:
        """Answers before the next step up."""
        return max(min(STEP_ANSWERS, FEW_ROUNDS * self._limit), FAIR_ROUNDS * self._peers * self._limit)

    def _open(self, by: float) -> None:
        self._limit = min(self._limit + by, float(self._most))
        self._opened = True

    def _close(self, ticket: Ticket) -> None:
        self._refused += 1
        if ticket.generation == self._generation:  # else begun before the last burst: a part of it
            self._generation += 1
            if self._opened:
                self._fast_until, self._opened = self._limit / 2, False
        self._limit = max(1.0, self._limit - 1.0)
        self._step = 1.0
        self._answers = 0

    def _take_failure(self, retry_after: float | None) -> None:
        self._failures += 1
        now = time.monotonic()
        if self._failures > max(FEW_FAILURES, self._in_flight) and now >= self._quiet_until:
            own = min(LONGEST_QUIET, 2.0**self._pauses)
            self._quiet_until = now + max(own, min(LONGEST_ASKED, retry_after or 0.0))
            self._pauses = min(self._pauses + 1, 10)

    @property
    def _places(self) -> int:
        return 1 if self._pauses else int(self._limit)

    def _free(self) -> bool:
        return self._in_flight < self._places and time.monotonic() >= self._quiet_until

    def _admit(self) -> None:
        while self._queue and self._free():
            place = heapq.heappop(self._queue)[2]
            if not place.done():
                self._waiting -= 1
                self._in_flight += 1
                place.set_result(None)
        quiet = self._quiet_until - time.monotonic()
        if self._queue and quiet > 0 and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(quiet, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._admit()
