"""Trying again: exponential backoff with jitter, `Retry-After`, a bounded number of tries, a deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from gristmill.errors import ErrorKind, ModelError
from gristmill.model.base import Attempt

T = TypeVar("T")

CLOCKS_APART = 0.05  # seconds that an event loop's clock may be before `time.monotonic()`


class Ticket(NamedTuple):
    """A place at a gate: after which of its bursts of refusals it was given."""

    generation: int


class Gate(Protocol):
    """Admits requests; see `adaptive.Limiter`."""

    async def enter(self, deadline: float | None = None) -> Ticket:
        """Wait for a place; returns a ticket for `leave`. The first deadline goes first, and None before all."""
        ...

    def leave(self, ticket: Ticket, error: ModelError | None = None, *, answered: bool = True) -> None:
        """Give it back, with what came of it."""
        ...


@dataclass(frozen=True)
class Backoff:
    """How long to wait. All times in seconds.

    `longest` bounds a wait of our own, `longest_asked` one that the endpoint asked for.
    """

    retries: int = 5
    first: float = 1.0
    longest: float = 60.0
    longest_asked: float = 300.0

    def wait(self, number: int, asked: float | None, chance: float) -> float:
        """Seconds before retry `number` (from 0); `chance` in [0, 1) spreads them.

        An asked wait is never shortened below what was asked (but for the bound), only lengthened a little, so that a
        thousand sessions that were told the same second do not all come back in it.
        """
        own = min(self.longest, self.first * 2.0**number) * (0.5 + 0.5 * chance)
        if asked is None:
            return own
        return min(self.longest_asked, asked) + min(own, 1.0) * chance


async def with_retries(
    ask: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    gate: Gate | None = None,
    deadline: float | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    chance: Callable[[], float] = random.random,
) -> tuple[T, tuple[Attempt, ...]]:
    """Ask until there is an answer; returns it with the attempts that failed before.

    Args:
        ask: one try; raises `ModelError`.
        backoff: how often and how long.
        gate: passed before each try; waiting there is no part of a try's seconds.
        deadline: `time.monotonic()` after which no try begins; a wait that would pass it is not begun either. Being
            cancelled then, for the session's time is over, is an error too unless a first try was under way: after a
            failure, or without a place, it is the endpoint that did not answer.
        sleep, chance: for tests.

    Raises:
        ModelError: the last one, when it is not worth another try; its `attempts` lists all.
    """
    attempts: list[Attempt] = []
    failure: ModelError | None = None
    while True:
        ticket: Ticket | None = None
        begun = time.monotonic()
        outcome: ModelError | None = None
        answered = True
        try:
            if gate:
                ticket = await gate.enter(deadline)
                begun = time.monotonic()
            return await ask(), tuple(attempts)
        except asyncio.CancelledError:
            answered = False
            if failure is None and gate and ticket is None:
                failure = ModelError(
                    "the endpoint takes fewer requests than there are sessions, and none was left for this one",
                    ErrorKind.TRANSIENT,
                    mend="Lower --concurrency, or raise --session_timeout.",
                )
            now = time.monotonic()
            if failure is None or deadline is None or now < deadline - CLOCKS_APART:
                raise
            attempts.append(Attempt(error="the session's time was over", kind=failure.kind.value, seconds=now - begun))
            failure.attempts = tuple(attempts)
            raise failure from None
        except ModelError as error:
            outcome = failure = error
            now = time.monotonic()
            again = error.kind.retryable and len(attempts) < backoff.retries
            pause = backoff.wait(len(attempts), error.retry_after, chance()) if again else 0.0
            if deadline is not None and now + pause >= deadline:
                again, pause = False, 0.0
            attempts.append(
                Attempt(
                    error=error.message,
                    kind=error.kind.value,
                    status=error.status,
                    seconds=now - begun,
                    waited=pause,
                )
            )
            if not again:
                error.attempts = tuple(attempts)
                raise
        except BaseException:
            answered = False
            raise
        finally:
            if gate and ticket:
                gate.leave(ticket, outcome, answered=answered)
        await sleep(pause)
