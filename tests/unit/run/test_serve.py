"""The budget as a worker sees it: what is granted is given back exactly once, whenever its session goes."""

from __future__ import annotations

import asyncio

import pytest

from gristmill.run import frames
from gristmill.run.serve import RemoteGate
from gristmill.session.record import BudgetSpent
from gristmill.types import Usage


async def test_a_reservation_of_a_session_that_is_gone_is_given_back_once() -> None:
    sent: list[frames.Frame] = []
    gate = RemoteGate(sent.append, budgeted=True)
    for when in ("before", "same moment"):
        sent.clear()
        asking = asyncio.create_task(gate.reserve())
        await asyncio.sleep(0)
        number = sent[0].id  # type: ignore[attr-defined]
        if when == "before":
            asking.cancel()
            await asyncio.sleep(0)
            gate.granted(number, "")
        else:
            gate.granted(number, "")
            asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)
        assert sent == [frames.Reserve(number), frames.Settle(None)], when


async def test_an_answer_about_credit_reserves_nothing() -> None:
    sent: list[frames.Frame] = []
    gate = RemoteGate(sent.append, budgeted=True)
    asking = asyncio.create_task(gate.out_of_credit("empty"))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)
    gate.granted(1, "")
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert sent == [frames.OutOfCredit(1, "empty")]


async def test_a_refusal_ends_the_session_and_credit_is_told_once() -> None:
    sent: list[frames.Frame] = []
    gate = RemoteGate(sent.append, budgeted=True)
    asking = asyncio.create_task(gate.reserve())
    await asyncio.sleep(0)
    gate.granted(1, "--max_cost is used up")
    with pytest.raises(BudgetSpent, match="max_cost"):
        await asking
    asking = asyncio.create_task(gate.out_of_credit("empty"))
    await asyncio.sleep(0)
    gate.granted(2, "")
    await asking
    gate.settle(Usage(prompt_tokens=1))
    gate.settle(Usage(prompt_tokens=1))
    assert [type(frame).__name__ for frame in sent] == ["Reserve", "OutOfCredit", "Settle", "CreditBack", "Settle"]
