"""Adaptive concurrency: the limiter by itself, and against a server that refuses what is too much."""

import asyncio
import time
from typing import Any

import pytest

from gristmill.errors import ErrorKind, ModelError
from gristmill.model.adaptive import FIRST, Limiter
from gristmill.model.base import Request
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, fail, say
from gristmill.types import Message

HELLO = Request(messages=[Message(role="user", content="hello")])


def refusal(retry_after: float | None = None, status: int = 429) -> ModelError:
    return ModelError("busy", ErrorKind.TRANSIENT, status=status, retry_after=retry_after)


async def fill(limiter: Limiter, count: int) -> list[Any]:
    return [await limiter.enter() for _ in range(count)]


async def test_it_admits_up_to_its_limit_and_then_in_order() -> None:
    limiter = Limiter(2)
    tickets = await fill(limiter, 2)
    order: list[int] = []

    async def wait(number: int) -> None:
        ticket = await limiter.enter()
        order.append(number)
        limiter.leave(ticket)

    waiting = [asyncio.create_task(wait(n)) for n in range(5)]
    await asyncio.sleep(0)
    assert (limiter.load.in_flight, limiter.load.waiting) == (2, 5)
    for ticket in tickets:
        limiter.leave(ticket)
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2, 3, 4]
    assert (limiter.load.in_flight, limiter.load.waiting, limiter.load.calls) == (0, 0, 7)


async def test_older_sessions_go_first() -> None:
    limiter = Limiter(1)
    ticket = await limiter.enter()
    order: list[float | None] = []

    async def wait(deadline: float | None) -> None:
        limiter.leave(await limiter.enter(deadline))
        order.append(deadline)

    tasks = [asyncio.create_task(wait(deadline)) for deadline in (30.0, 10.0, 40.0, 20.0, None)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    assert limiter.load.waiting == 4
    limiter.leave(ticket)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [None, 10.0, 20.0, 30.0] and limiter.load.waiting == 0


async def test_answers_open_it_up_to_its_share() -> None:
    limiter = Limiter(20)
    assert limiter.load.limit == FIRST
    for _ in range(100):
        for ticket in await fill(limiter, limiter.load.limit):
            limiter.leave(ticket)
    assert limiter.load.limit == 20


async def test_answers_that_did_not_fill_it_do_not_open_it() -> None:
    limiter = Limiter(100)
    for _ in range(100):
        limiter.leave(await limiter.enter())
    assert limiter.load.limit == FIRST


async def opened(share: int, **options: int) -> Limiter:
    """One that has opened to its share."""
    limiter = Limiter(share, **options)
    while limiter.load.limit < share:
        for ticket in await fill(limiter, limiter.load.limit):
            limiter.leave(ticket)
    return limiter


async def answers_until(limiter: Limiter, limit: int) -> int:
    """How many answers of a limiter that is always full open it to this limit."""
    tickets: list[Any] = []
    answers = 0
    while limiter.load.limit < limit:
        tickets += await fill(limiter, limiter.load.limit - limiter.load.in_flight)
        limiter.leave(tickets.pop())
        answers += 1
    for ticket in tickets:
        limiter.leave(ticket)
    return answers


async def test_each_refusal_closes_it_by_one() -> None:
    limiter = await opened(60)
    tickets = await fill(limiter, 60)
    for ticket in tickets[:20]:
        limiter.leave(ticket, refusal())
    assert (limiter.load.limit, limiter.load.refused) == (40, 20)
    # What was accepted before the last refusal says nothing new.
    for ticket in tickets[20:]:
        limiter.leave(ticket)
    assert limiter.load.limit == 40


@pytest.mark.parametrize(("peers", "answers"), [(1, 100), (8, 780)])
async def test_after_a_refusal_it_opens_by_one_in_so_many_answers(peers: int, answers: int) -> None:
    limiter = await opened(40, peers=peers)
    limiter.leave((await fill(limiter, 1))[0], refusal())
    assert limiter.load.limit == 39
    assert await answers_until(limiter, 40) == answers


async def test_after_a_collapse_it_opens_fast_to_half() -> None:
    limiter = await opened(40)
    for ticket in await fill(limiter, 40):
        limiter.leave(ticket, refusal())
    assert limiter.load.limit == 1
    assert await answers_until(limiter, 20) < 80
    assert await answers_until(limiter, 21) == 100


async def test_workers_share_the_beginning() -> None:
    assert [Limiter(16, peers=n).load.limit for n in (1, 4, 100)] == [FIRST, FIRST // 4, 1]


async def test_other_errors_do_not_close_it() -> None:
    limiter = Limiter(8)
    errors = (refusal(status=500), refusal(status=408), ModelError("no", ErrorKind.CREDIT, status=429))
    for error in errors * 5:
        limiter.leave(await limiter.enter(), error)
    assert (limiter.load.limit, limiter.load.refused) == (8, 0)


async def test_it_never_closes_entirely() -> None:
    limiter = await opened(20)
    for ticket in await fill(limiter, 20) * 2:
        limiter.leave(ticket, refusal())
    assert limiter.load.limit == 1


@pytest.mark.parametrize("status", [429, 0, 502])
@pytest.mark.parametrize(("asked", "quiet"), [(None, 1.0), (1.5, 1.5)])
async def test_failures_without_an_answer_between_make_it_quiet(asked: float | None, quiet: float, status: int) -> None:
    limiter = Limiter(4)
    for _ in range(4):
        limiter.leave(await limiter.enter(), refusal(asked, status))
    begun = time.monotonic()
    ticket = await limiter.enter()
    assert quiet - 0.1 < time.monotonic() - begun < quiet + 5
    assert limiter.load.limit == 1  # only one tries
    limiter.leave(ticket)
    assert limiter.load.limit == (1 if status == 429 else 4)  # an answer has come
    begun = time.monotonic()
    limiter.leave(await limiter.enter(), refusal(asked, status))
    await limiter.enter()
    assert time.monotonic() - begun < 0.5


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "given in the same moment"])
async def test_a_cancelled_wait_gives_its_place_back(given: bool) -> None:
    limiter = Limiter(1)
    ticket = await limiter.enter()
    waiting = asyncio.create_task(limiter.enter())
    await asyncio.sleep(0)
    if given:
        limiter.leave(ticket)
        waiting.cancel()
    else:
        waiting.cancel()
        await asyncio.sleep(0)
        limiter.leave(ticket)
    await asyncio.gather(waiting, return_exceptions=True)
    assert (limiter.load.in_flight, limiter.load.waiting) == (0, 0)
    limiter.leave(await asyncio.wait_for(limiter.enter(), 1))


async def test_a_server_that_allows_so_many_is_used_and_seldom_refuses(model_at: Any) -> None:
    allowed, latency = 12, 0.05
    live = 0
    served = refused = 0

    def script(request: dict[str, Any], headers: Any) -> Turn:
        nonlocal live, served, refused
        if live >= allowed:
            refused += 1
            return fail(429, "busy", headers={"Retry-After": "0.2"})
        live += 1
        served += 1

        def done() -> None:
            nonlocal live
            live -= 1

        asyncio.get_running_loop().call_later(latency, done)
        return say("x", latency=latency)

    until = time.monotonic() + 3.0
    async with ScriptedEndpoint(script, keep=0) as endpoint:
        model = model_at(endpoint.url)

        async def session() -> None:
            while time.monotonic() < until:
                await model.complete(HELLO)

        await asyncio.gather(*(session() for _ in range(32)))
    assert refused / (served + refused) < 0.05
    assert 8 <= model.load.limit <= 20
    # Of what the server could have served in this time; this process is server and client in one.
    assert served > 0.5 * allowed * 3.0 / latency


async def test_a_cancelled_request_gives_its_place_back(model_at: Any) -> None:
    async with ScriptedEndpoint([say("late", latency=30)]) as endpoint:
        model = model_at(endpoint.url)
        task = asyncio.create_task(model.complete(HELLO))
        while not endpoint.in_flight:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (model.load.in_flight, model.load.calls) == (0, 0)
