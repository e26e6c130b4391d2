"""The run's budget: every model call reserves what it may cost before it starts, and settles what it did cost after.

The estimate of a call is the dearest one seen so far; of calls side by side, twice that, for conversations grow and so
do their prices. So fewer and fewer go at once as the limit comes near, in the end one at a time. Until one call has
been settled, calls go one at a time too, so that no burst of first calls passes the limit unseen. A call that does not
fit waits while others are still to be settled, for they may turn out cheaper, and is refused once none is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gristmill.types import Usage

FIRST_PROBE = 5.0  # seconds before an empty account is tried again; doubled up to LAST_PROBE
LAST_PROBE = 60.0
GROWTH = 2  # a call may cost so many times as much as the dearest one before it


class Budget:
    """Money in US dollars, tokens and seconds of wall time of the whole run; None is no limit.

    `spent_…` is what earlier invocations of the run used. `on_pause(reason, seconds)` and `on_resume()` tell when an
    empty account holds the run and when it goes on; `pause_limit` is the longest pause in seconds.
    """

    def __init__(
        self,
        *,
        max_cost: float | None = None,
        max_tokens: int | None = None,
        max_time: float | None = None,
        pause_limit: float = 600.0,
        spent_cost: float = 0.0,
        spent_tokens: int = 0,
        spent_calls: int = 0,
        on_pause: Callable[[str, float], None] | None = None,
        on_resume: Callable[[], None] | None = None,
    ) -> None:
        self._max_cost = max_cost
        self._max_tokens = max_tokens
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self._pause_limit = pause_limit
        self._on_pause = on_pause
        self._on_resume = on_resume
        self.cost = spent_cost
        self.tokens = spent_tokens
        # Of the dearest call; from an earlier invocation only the mean is known.
        self._call_cost = spent_cost / spent_calls if spent_calls else None
        self._call_tokens = spent_tokens // spent_calls if spent_calls else None
        self._open = 0
        self._changed = asyncio.Condition()
        self._paused_at: float | None = None
        self._probe_wait = FIRST_PROBE
        self.spent_reason = ""

    @property
    def limited(self) -> bool:
        """True where calls must be reserved."""
        return self._max_cost is not None or self._max_tokens is not None or self._deadline is not None

    async def reserve(self) -> str:
        """Wait for room for one call. Empty: go on, and settle later. Else: why the budget does not cover it."""
        async with self._changed:
            while not self.spent_reason:
                reason, may_fit_later = self._refusal()
                if not reason:
                    self._open += 1
                    return ""
                if not may_fit_later:
                    self.spent_reason = reason
                    self._changed.notify_all()
                    break
                await self._changed.wait()
            return self.spent_reason

    async def settle(self, usage: Usage | None) -> None:
        """Give back a reservation, with what the call used; None where it gave no answer."""
        async with self._changed:
            self._open -= 1
            if usage is not None:
                self.cost += usage.cost_usd
                self.tokens += usage.total_tokens
                self._call_cost = max(self._call_cost or 0.0, usage.cost_usd)
                self._call_tokens = max(self._call_tokens or 0, usage.total_tokens)
            self._changed.notify_all()

    def _refusal(self) -> tuple[str, bool]:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "--max_time is over", False
        if self._max_cost is None and self._max_tokens is None:
            return "", False
        if self._call_tokens is None and self._open:
            return "the first call is not settled yet", True
        calls = GROWTH * (self._open + 1) if self._open else 1
        if self._max_cost is not None and self.cost + calls * (self._call_cost or 0.0) > self._max_cost + 1e-9:
            return f"--max_cost ${self._max_cost:g} is used up (${self.cost:.4f} spent)", self._open > 0
        if self._max_tokens is not None and self.tokens + calls * (self._call_tokens or 0) > self._max_tokens:
            return f"--max_total_tokens {self._max_tokens} is used up ({self.tokens} used)", self._open > 0
        return "", False

    async def out_of_credit(self, message: str) -> str:
        """Called after a 402: waits until a try is sensible. Empty: try again. Else: the pause was too long."""
        now = time.monotonic()
        if self._paused_at is None:
            self._paused_at = now
            if self._on_pause is not None:
                self._on_pause(message, self._pause_limit)
        left = self._paused_at + self._pause_limit - now
        if left <= 0 or self.spent_reason:
            self.spent_reason = self.spent_reason or f"the account is out of credit: {message}"
            return self.spent_reason
        wait = min(self._probe_wait, left)
        self._probe_wait = min(2 * self._probe_wait, LAST_PROBE)
        await asyncio.sleep(wait)
        return ""

    def credit_back(self) -> None:
        """A call was answered: whatever held the run is over."""
        if self._paused_at is not None:
            self._paused_at = None
            self._probe_wait = FIRST_PROBE
            if self._on_resume is not None:
                self._on_resume()

    @property
    def paused(self) -> bool:
        """True while an empty account holds the run."""
        return self._paused_at is not None
