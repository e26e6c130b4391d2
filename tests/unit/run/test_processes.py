"""Workers that die, block, lie or wait: every session comes back exactly once, and the run ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.config import RunConfig
from gristmill.errors import SetupError
from gristmill.run import frames, processes
from gristmill.run.budget import Budget
from gristmill.run.processes import ProcessExecutor
from gristmill.session.spec import Finished, SessionSpec
from gristmill.session.summary import RowShape, lost_session
from gristmill.task import Task
from gristmill.types import Message, Outcome

ODD_WORKER = [sys.executable, str(Path(__file__).parents[2] / "support" / "odd_worker.py")]
SHAPE = RowShape(model="m", known_tools=())

Make = Callable[..., ProcessExecutor]


@pytest.fixture
async def executor() -> AsyncIterator[Make]:
    made: list[ProcessExecutor] = []

    def make(
        workers: int = 1, slots: int = 4, budget: Budget | None = None, command: list[str] = ODD_WORKER
    ) -> ProcessExecutor:
        begin = frames.Begin(
            config=RunConfig(dataset_file="d", batch_size=1, run_name="r"),
            run_id="r",
            seed=1,
            known_tools=(),
            toolsets=(),
            mcp=b"",
            workers=workers,
            slots=slots,
            budgeted=True,
        )
        given = ProcessExecutor(
            begin,
            workers=workers,
            concurrency=workers * slots,
            command=command,
            lost=lambda spec, reason: lost_session(spec, reason, SHAPE),
            budget=budget or Budget(),
        )
        made.append(given)
        return given

    yield make
    for each in made:
        await each.close()
        assert each.pids == []


def specs(*texts: str, **task: Any) -> list[SessionSpec]:
    return [
        SessionSpec(
            task=Task(index=index, line=index + 1, key=text, text=text, **task),
            sample=0,
            batch=0,
            attempt=1,
            toolsets=(),
            probability=1.0,
            seed=1,
        )
        for index, text in enumerate(texts)
    ]


async def run(executor: ProcessExecutor, given: list[SessionSpec], seconds: float = 60) -> list[Finished]:
    async with asyncio.timeout(seconds):
        return [finished async for finished in executor.run(iter(given), lambda spec: None)]


async def test_du_07_a_session_whose_dead_worker_is_still_buried_is_not_forgotten(executor: Make) -> None:
    """DU-07: the other worker's last result comes while the dead one has not ended yet."""
    ended = await run(executor(workers=2, slots=1), specs("ok 0.5", "linger"))
    assert sorted(finished.prompt_index for finished in ended) == [0, 1]
    assert {finished.prompt_index: finished.state for finished in ended} == {0: "kept", 1: "failed"}


async def test_a_session_that_kills_workers_holds_up_no_other(executor: Make) -> None:
    """Its last try has a worker of its own; what shared a worker with it before does not wait for each other."""
    begun = time.monotonic()
    ended = await run(executor(slots=3), specs("die", "ok 2", "ok 2.1", *["ok"] * 12))
    assert sorted(finished.prompt_index for finished in ended) == list(range(15))
    assert [f.prompt_index for f in ended if f.state == "failed"] == [0]
    assert "its worker process died 3 times (exit status 1)" in next(f.reason for f in ended if f.state == "failed")
    # The quick ones are done before those that were with it twice.
    assert {finished.prompt_index for finished in ended[-2:]} == {1, 2}
    assert time.monotonic() - begun < 20


async def test_what_is_given_up_without_a_word_is_tried_again_and_then_told(executor: Make) -> None:
    ended = await run(executor(), specs("lost", "ok"))
    assert {f.prompt_index: f.state for f in ended} == {0: "failed", 1: "kept"}
    assert "broke off 3 times" in next(f.reason for f in ended if f.state == "failed")


async def test_nonsense_of_a_worker_is_its_death(executor: Make) -> None:
    ended = await run(executor(), specs("garbage", "ok"))
    assert {f.prompt_index: f.state for f in ended} == {0: "failed", 1: "kept"}
    assert "what is no frame" in next(f.reason for f in ended if f.state == "failed")


async def test_a_worker_that_does_not_answer_is_killed_and_the_row_says_why(
    executor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(processes, "SILENCE_SECONDS", 1.5)
    ended = await run(executor(), specs("block"))
    assert "it did not answer for" in ended[0].reason


async def test_a_row_that_no_frame_can_hold_fails_alone(executor: Make) -> None:
    part = {"type": "text", "text": "hi", "odd": 2**70}
    odd = specs("odd", history=(Message(role="user", content=[part]),))
    ended = await run(executor(), [*odd, *specs("ok", "ok")])
    assert [f.state for f in ended].count("kept") == 2
    assert "cannot be given to a worker" in next(f.reason for f in ended if f.state == "failed")


async def test_a_reservation_that_a_dead_worker_waited_for_is_given_back(executor: Make) -> None:
    budget = Budget(max_tokens=100)
    await run(executor(budget=budget), specs("reserve"))
    # Without a settled call, calls go one at a time: there is room only if nothing is left reserved.
    assert await asyncio.wait_for(budget.reserve(), 2) == ""


async def test_co_05_nothing_starts_once_a_budget_is_spent(executor: Make) -> None:
    """CO-05: also before the refused session has ended, which tells the runner of it."""
    budget = Budget(max_tokens=1)
    given = specs(*["ok 0.2"] * 9)
    begun: list[int] = []
    running = executor(slots=2, budget=budget).run(iter(given), lambda spec: begun.append(spec.task.index))
    first = await anext(running)
    budget.spent_reason = "--max_total_tokens 1 is used up"
    ended = [first, *[finished async for finished in running]]
    assert sorted(finished.prompt_index for finished in ended) == begun and len(begun) <= 3


async def test_a_stop_in_a_pause_ends_at_once(executor: Make) -> None:
    paused = asyncio.Event()
    given = executor(budget=Budget(on_pause=lambda reason, seconds: paused.set()))
    running = asyncio.create_task(run(given, specs("credit")))
    await asyncio.wait_for(paused.wait(), 60)
    begun = time.monotonic()
    given.stop(Outcome.INTERRUPTED)
    assert await running == []
    await given.close()
    assert time.monotonic() - begun < 20


async def test_a_stop_while_workers_start_does_not_wait_for_them(executor: Make) -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    given = executor(workers=4, slots=1, command=slow)
    running = asyncio.create_task(run(given, specs("ok", "ok", "ok", "ok")))
    await asyncio.sleep(0.3)
    given.stop(Outcome.INTERRUPTED)
    assert await asyncio.wait_for(running, 20) == []


async def test_a_pause_in_which_nobody_is_left_to_ask_goes_on(executor: Make) -> None:
    """CO-02: the sessions that met the empty account are gone; the next one finds out whether it still is."""
    resumed: list[bool] = []
    budget = Budget(on_resume=lambda: resumed.append(True))
    ended = await run(executor(slots=1, budget=budget), specs("credit die", "ok", "ok"))
    assert [f.prompt_index for f in ended if f.state == "kept"] == [1, 2]
    assert resumed == [True] and not budget.paused


async def test_workers_that_cannot_be_started_are_said(executor: Make) -> None:
    with pytest.raises(SetupError, match="cannot be started"):
        await run(executor(command=["/nowhere/python"]), specs("ok"))
    with pytest.raises(SetupError, match="do not start"):
        await run(executor(command=[sys.executable, "-c", "raise SystemExit('no such module')"]), specs("ok"))
