"""How many requests an endpoint gets at once: additive increase, multiplicative decrease, one limiter per worker.

It begins low and opens by half with each round of answers until the endpoint first says no (429, 503, 529). From then
on it opens step by step in time, and closes to 95 % of what was accepted when it is told no again. Since all workers
open alike and those with much lose more, they come to equal shares of what the endpoint gives them together. When
refusals come without an answer between them, nothing new starts until the endpoint's `Retry-After` has passed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from gristmill.errors import ErrorKind, ModelError
from gristmill.model.retry import Ticket

FIRST = 8  # requests at once at the beginning
DECREASE = 0.95
GROWTH = 1.5  # each step up without a refusal is larger than the one before by this factor
STEP_SECONDS = 2.0  # at least this long between two steps up,
STEP_ANSWERS = 10.0  # and this many times as long as an answer takes
REFUSALS = frozenset({429, 503, 529})  # statuses that mean "too much at once"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for the progress display: what is allowed at once, what runs, what waits, how many were refused."""

    limit: int
    in_flight: int
    waiting: int
    calls: int
    refused: int


class Limiter:
    """Admits requests of one worker, first come first served. `share` is the most that it can have in flight."""

    def __init__(self, share: int) -> None:
        self._most = max(1, share)
        self._limit = float(min(self._most, FIRST))
        self._step = 0.0  # of the next step up; 0: not yet refused, so by half with each round
        self._stepped = 0.0  # when the last step up or down was made
        self._latency = 0.0  # seconds of an answer, smoothed
        self._in_flight = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._generation = 0  # counts decreases: a burst of refusals is one
        self._refusals_in_a_row = 0
        self._quiet_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._calls = 0
        self._refused = 0

    @property
    def load(self) -> Load:
        """What is going on."""
        return Load(
            limit=int(self._limit),
            in_flight=self._in_flight,
            waiting=len(self._waiters),
            calls=self._calls,
            refused=self._refused,
        )

    async def enter(self) -> Ticket:
        """Wait for a place; returns a ticket for `leave`."""
        if self._waiters or not self._free():
            place = asyncio.get_running_loop().create_future()
            self._waiters.append(place)
            self._admit()
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():  # it was given the place in the same moment
                    self._in_flight -= 1
                    self._admit()
                elif place in self._waiters:
                    self._waiters.remove(place)
                raise
        else:
            self._in_flight += 1
        return Ticket(self._generation, time.monotonic())

    def leave(self, ticket: Ticket, error: ModelError | None = None, *, answered: bool = True) -> None:
        """Give the place back, with what came of it; `answered` False says nothing (a cancelled request)."""
        full = self._in_flight >= int(self._limit)
        self._in_flight -= 1
        if answered:
            self._calls += 1
            if error is None or error.status not in REFUSALS or error.kind is not ErrorKind.TRANSIENT:
                self._take_answer(full, time.monotonic() - ticket.begun)
            else:
                self._take_refusal(ticket, error)
        self._admit()

    def _take_answer(self, full: bool, seconds: float) -> None:
        self._refusals_in_a_row = 0
        self._latency += (seconds - self._latency) * (0.1 if self._latency else 1.0)
        if not full or self._limit >= self._most:
            return
        if not self._step:
            self._limit += 0.5
        elif time.monotonic() - self._stepped >= max(STEP_SECONDS, STEP_ANSWERS * self._latency):
            self._stepped = time.monotonic()
            self._limit += self._step
            self._step *= GROWTH
        self._limit = min(self._limit, self._most)

    def _take_refusal(self, ticket: Ticket, error: ModelError) -> None:
        self._refused += 1
        self._refusals_in_a_row += 1
        if self._refusals_in_a_row > max(3, self._in_flight) and error.retry_after:
            self._quiet_until = max(self._quiet_until, time.monotonic() + error.retry_after)
        # What is still in flight is at most what the endpoint accepts; after a burst of refusals it is just that.
        self._limit = max(1.0, min(self._limit, float(self._in_flight)))
        if ticket.generation != self._generation:
            return  # begun before the last decrease: the same burst
        self._generation += 1
        self._limit = max(1.0, self._limit * DECREASE)
        self._step = 1.0
        self._stepped = time.monotonic()

    def _free(self) -> bool:
        return self._in_flight < int(self._limit) and time.monotonic() >= self._quiet_until

    def _admit(self) -> None:
        while self._waiters and self._free():
            place = self._waiters.popleft()
            if not place.done():
                self._in_flight += 1
                place.set_result(None)
        quiet = self._quiet_until - time.monotonic()
        if self._waiters and quiet > 0 and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(quiet, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._admit()
