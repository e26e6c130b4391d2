"""How many requests an endpoint gets at once: additive increase, multiplicative decrease, one limiter per worker.

It begins low and opens by one per answer until the endpoint first says no (429, 503, 529). Then it closes by a tenth,
opens quickly again to just below where that happened, and tries one more only after `PATIENCE` answers, so that
refusals stay under one call in a hundred. When refusals come without an answer between them, nothing new starts until
the endpoint's `Retry-After` has passed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from gristmill.errors import ErrorKind, ModelError

FIRST = 16  # requests at once at the beginning
DECREASE = 0.9
PATIENCE = 200  # answers at the known ceiling before one more is tried
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
        self._ceiling: float | None = None  # where the endpoint last said no
        self._patience = 0
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

    async def enter(self) -> int:
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
        return self._generation

    def leave(self, ticket: int, error: ModelError | None = None, *, answered: bool = True) -> None:
        """Give the place back, with what came of it; `answered` False says nothing (a cancelled request)."""
        full = self._in_flight >= int(self._limit)
        self._in_flight -= 1
        if answered:
            self._calls += 1
            if error is None or error.status not in REFUSALS or error.kind is not ErrorKind.TRANSIENT:
                self._take_answer(full)
            else:
                self._take_refusal(ticket, error)
        self._admit()

    def _take_answer(self, full: bool) -> None:
        self._refusals_in_a_row = 0
        if not full or self._limit >= self._most:
            return
        if self._ceiling is None:
            step = 1.0
        elif self._limit < self._ceiling - 1:
            step = 4 / self._limit
        else:
            self._patience += 1
            if self._patience < PATIENCE:
                return
            self._patience = 0
            self._ceiling += 1
            step = 1.0
        self._limit = min(self._most, self._limit + step)

    def _take_refusal(self, ticket: int, error: ModelError) -> None:
        self._refused += 1
        self._refusals_in_a_row += 1
        if self._refusals_in_a_row > max(3, self._in_flight) and error.retry_after:
            self._quiet_until = max(self._quiet_until, time.monotonic() + error.retry_after)
        if ticket != self._generation:
            return  # begun before the last decrease: the same burst
        self._generation += 1
        self._patience = 0
        self._ceiling = max(1.0, float(self._in_flight + 1))
        self._limit = max(1.0, min(self._limit, self._ceiling) * DECREASE)

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
