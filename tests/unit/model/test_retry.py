"""Trying again: how often, how long, and when not."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import ErrorKind, ModelError
from gristmill.model.adaptive import Limiter
from gristmill.model.retry import Backoff, with_retries


class Sleeps(list[float]):
    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


def failing(times: int, kind: ErrorKind = ErrorKind.TRANSIENT, retry_after: float | None = None):
    left = [times]

    async def ask() -> str:
        if left[0]:
            left[0] -= 1
            raise ModelError("no", kind, status=500, retry_after=retry_after)
        return "yes"

    return ask


async def test_failures_are_listed_beside_the_answer() -> None:
    sleeps = Sleeps()
    answer, attempts = await with_retries(failing(3), Backoff(), sleep=sleeps, chance=lambda: 0.99)
    assert answer == "yes"
    assert [a.waited for a in attempts] == list(sleeps)
    assert [a.status for a in attempts] == [500, 500, 500]
    assert sleeps[0] < sleeps[1] < sleeps[2]


async def test_tries_are_bounded_and_the_last_error_lists_all() -> None:
    sleeps = Sleeps()
    with pytest.raises(ModelError) as caught:
        await with_retries(failing(99), Backoff(retries=2), sleep=sleeps)
    assert len(sleeps) == 2
    assert len(caught.value.attempts) == 3
    assert caught.value.attempts[-1].waited == 0.0


@pytest.mark.parametrize("kind", [k for k in ErrorKind if not k.retryable])
async def test_a_permanent_failure_is_not_tried_again(kind: ErrorKind) -> None:
    with pytest.raises(ModelError) as caught:
        await with_retries(failing(1, kind), Backoff(), sleep=Sleeps())
    assert len(caught.value.attempts) == 1


async def test_an_asked_wait_is_kept() -> None:
    sleeps = Sleeps()
    await with_retries(failing(1, retry_after=7.0), Backoff(first=0.1), sleep=sleeps)
    assert 7.0 <= sleeps[0] <= 8.0


async def test_no_wait_passes_the_deadline() -> None:
    sleeps = Sleeps()
    deadline = time.monotonic() + 5.0
    with pytest.raises(ModelError):
        await with_retries(failing(1, retry_after=6.0), Backoff(), deadline=deadline, sleep=sleeps)
    assert sleeps == []
    assert await with_retries(failing(1, retry_after=1.0), Backoff(), deadline=deadline, sleep=sleeps)


@pytest.mark.parametrize(("failures", "raised"), [(1, ModelError), (0, TimeoutError)])
async def test_a_try_after_a_failure_that_the_deadline_ends_is_that_failure(
    failures: int, raised: type[Exception]
) -> None:
    """The first try that is too slow is the caller's own time-out; after a failure the endpoint is to blame."""
    fails = failing(failures)

    async def ask() -> str:
        await fails()
        await asyncio.sleep(30)
        return "late"

    with pytest.raises(raised) as caught:
        async with asyncio.timeout(0.2):
            await with_retries(ask, Backoff(first=0.01), deadline=time.monotonic() + 0.2)
    if isinstance(caught.value, ModelError):
        assert [a.error for a in caught.value.attempts] == ["no", "the session's time was over"]
        assert caught.value.attempts[-1].seconds > 0.1


async def test_a_session_that_never_got_a_place_before_its_deadline_fails() -> None:
    limiter = Limiter(1)
    await limiter.enter()
    with pytest.raises(ModelError, match="fewer requests than there are sessions"):
        async with asyncio.timeout(0.1):
            await with_retries(failing(0), Backoff(), gate=limiter, deadline=time.monotonic() + 0.1)
    assert limiter.load.waiting == 0


async def test_a_cancellation_before_the_deadline_passes_through() -> None:
    fails = failing(1)

    async def ask() -> str:
        await fails()
        await asyncio.sleep(30)
        return "late"

    task = asyncio.create_task(with_retries(ask, Backoff(first=0.01), deadline=time.monotonic() + 20))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@given(st.integers(0, 200), st.one_of(st.none(), st.floats(0, 1e9)), st.floats(0, 0.999))
def test_every_wait_is_bounded(number: int, asked: float | None, chance: float) -> None:
    backoff = Backoff()
    wait = backoff.wait(number, asked, chance)
    assert 0 <= wait <= backoff.longest_asked + 1
    if asked is not None:
        assert wait >= min(asked, backoff.longest_asked)
