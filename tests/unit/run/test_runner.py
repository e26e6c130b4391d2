"""When a run ends: errors that every session would meet, spent budgets, signals at any moment, terminals that go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill import events
from gristmill.config import RunConfig
from gristmill.dataset import read_tasks
from gristmill.errors import SetupError
from gristmill.run.runner import Batches, Runner
from gristmill.run.store import RunStore
from gristmill.session.record import SessionRecord
from gristmill.session.spec import Finished, SessionSpec
from gristmill.session.summary import RowShape, finish
from gristmill.types import ErrorInfo, Message, Outcome

SHAPE = RowShape(model="m", known_tools=())


class Listed:
    """An executor whose sessions end as a list says, one at a time; `on` is called before each."""

    limit = in_flight = refused = 0

    def __init__(self, *ends: str, on: Callable[[int], None] = lambda number: None) -> None:
        self._ends = ends
        self._on = on
        self.calls: list[str] = []

    async def run(
        self, specs: Iterator[SessionSpec], started: Callable[[SessionSpec], None]
    ) -> AsyncIterator[Finished]:
        for number, (end, spec) in enumerate(zip(self._ends, specs, strict=False)):
            if self.calls:
                return
            started(spec)
            self._on(number)
            await asyncio.sleep(0)
            if end == "broken":
                raise SetupError("Worker processes do not start.")
            yield _ended(spec, end)

    def hold(self) -> None:
        self.calls.append("hold")

    def stop(self, outcome: Outcome) -> None:
        self.calls.append(f"stop {outcome}")

    def wake(self) -> None:
        return None

    async def close(self) -> None:
        return None


def _ended(spec: SessionSpec, end: str) -> Finished:
    record = SessionRecord(spec=spec, tools=(), messages=[Message(role="user", content="p")])
    record.outcome = {"good": Outcome.COMPLETED, "budget": Outcome.BUDGET}.get(end, Outcome.MODEL_ERROR)
    record.reason = "HTTP 401" if end == "401" else end
    record.fatal = end == "401"
    record.error = ErrorInfo(type=end, message=record.reason)
    return finish(record, SHAPE, ())


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    stores: list[RunStore] = []

    def runner(executor: Listed, sessions: int = 10, listen: Any = lambda event: None, start: Any = None) -> Runner:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f'{{"prompt": "task {n}"}}\n' for n in range(sessions)))
        config = RunConfig(dataset_file=str(path), batch_size=4, run_name="r", output_dir=str(tmp_path))
        dataset = read_tasks(str(path))
        store = RunStore.open(config, dataset, known_tools=())
        stores.append(store)
        owed = store.owed(dataset.tasks, 1).owed
        batches = Batches((item.task.index for item in owed), 4, 0)
        specs = (
            SessionSpec(task=i.task, sample=0, batch=b, attempt=1, toolsets=(), probability=1.0, seed=1)
            for i, b in zip(owed, batches.of, strict=True)
        )
        planned = events.RunPlanned.of(config, dataset, batches=3, seed=1, directory="d")

        async def started() -> Listed:
            return executor

        return Runner(config, planned, store, specs, batches, start or started, listen)

    yield runner
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("ends", "call"),
    [
        (["401"] * 9, "stop interrupted"),
        (["other", "401", "401", "401", "401"], "stop interrupted"),  # also where the first one failed otherwise
        (["401", "other", "401", "401", "401"], "stop interrupted"),
        (["good", "401", "401", "401", "401"], "hold"),
    ],
)
async def test_cl_03_errors_that_every_session_meets_end_the_run(
    make: Callable[..., Runner], ends: list[str], call: str
) -> None:
    """CL-03: exit 1 with that error, after three of them."""
    executor = Listed(*ends)
    report = await make(executor).run()
    assert executor.calls == [call]
    assert (report.exit_status, report.error) == (1, "HTTP 401")
    assert report.statistics["attempts"] <= 5


async def test_one_prompt_that_an_endpoint_forbids_does_not_end_the_run(make: Callable[..., Runner]) -> None:
    executor = Listed("good", "401", "401", "good", "401", "401", "good", "good", "good", "good")
    report = await make(executor).run()
    assert executor.calls == [] and report.exit_status == 3
    assert report.statistics["reconcile"]["kept"] == 6


async def test_a_signal_while_a_spent_budget_waits_for_sessions_still_ends_them(make: Callable[..., Runner]) -> None:
    executor = Listed("budget")
    runner = make(executor)

    def listen(event: events.Event) -> None:
        if isinstance(event, events.SessionEnded):
            runner.stop("interrupted by SIGINT", 130)

    runner._listen = listen
    report = await runner.run()
    assert executor.calls == ["hold", "stop interrupted"] and report.exit_status == 130


async def test_a_stop_in_the_moment_when_the_executor_is_ready_is_not_lost(make: Callable[..., Runner]) -> None:
    executor = Listed("good")
    runner = make(executor)

    async def start() -> Listed:
        # It comes when the task that starts has ended, and the one that waits for it has not gone on yet.
        asyncio.get_running_loop().call_soon(runner.stop, "interrupted by SIGTERM", 143)
        return executor

    runner._make_executor = start
    report = await runner.run()
    assert report.exit_status == 143 and report.statistics["reconcile"]["pending"] == 10


async def test_a_terminal_that_goes_costs_its_lines_only(make: Callable[..., Runner]) -> None:
    def listen(event: events.Event) -> None:
        raise OSError(5, "Input/output error")

    executor = Listed(*["good"] * 10)
    report = await make(executor, listen=listen).run()
    assert report.statistics["reconcile"]["kept"] == 10 and report.exit_status == 0


async def test_an_executor_that_fails_later_leaves_a_merged_run(make: Callable[..., Runner]) -> None:
    with pytest.raises(SetupError):
        await make(Listed("broken")).run()
    report = await make(Listed("good", "good", "broken")).run()
    assert (report.exit_status, report.error) == (1, "Worker processes do not start.")
    assert report.statistics["reconcile"]["kept"] == 2


def test_batches_are_of_consecutive_prompts_and_count_samples() -> None:
    batches = Batches([3, 3, 5, 8, 8, 9], 2, 7)
    assert list(batches.of) == [7, 7, 7, 8, 8, 8]
    assert batches.prompts == {7: 2, 8: 2} and batches.sessions == {7: 3, 8: 3}
