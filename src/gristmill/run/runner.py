"""The run: owed prompts → sessions → durable rows → merge → statistics. Prompts are scheduled; batches are files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from gristmill import events
from gristmill.config import RunConfig
from gristmill.errors import GristmillError, StoreError
from gristmill.run.executor import Executor
from gristmill.run.store import RunStore
from gristmill.session.spec import Finished, SessionSpec
from gristmill.types import Outcome

FIRST_SESSIONS = 3  # so many first sessions with the same error of the endpoint end the run at once
UNWRITTEN_LIMIT = 512  # rows that may wait for the disk before no further result is taken
PROGRESS_SECONDS = 0.5

MakeExecutor = Callable[[], Coroutine[None, None, Executor]]


class Runner:
    """One invocation of a run.

    Args:
        config: its settings.
        planned: the figures of the summary.
        store: the run directory, locked by us.
        specs: every session that is owed, in order; the batches are in them.
        make_executor: starts what sessions run in; called only if something is owed.
        listen: told what happens.
        resumed: what a resumed run found, None for a new one.
        warnings: sentences for the user.
        release: gives back what `make_executor` started beside the executor.
    """

    def __init__(
        self,
        config: RunConfig,
        planned: events.RunPlanned,
        store: RunStore,
        specs: list[SessionSpec],
        make_executor: MakeExecutor,
        listen: events.Listener,
        *,
        resumed: events.Resumed | None = None,
        warnings: tuple[str, ...] = (),
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._planned = planned
        self._store = store
        self._specs = specs
        self._make_executor = make_executor
        self._listen = listen
        self._resumed = resumed
        self._warnings = warnings
        self._release = release
        self._executor: Executor | None = None
        self._batches = _Batches(specs, listen)
        self._texts = {spec.task.index: spec.task.text for spec in specs}
        self._ended = 0
        self._useful = 0
        self._fatal: list[str] = []
        self._status = 0
        self._error: GristmillError | None = None
        self._stop_reason = ""
        self._starting: asyncio.Task[Executor] | None = None

    def stop(self, reason: str, status: int) -> None:
        """End the run cleanly: what runs is recorded as interrupted and stays owed."""
        if self._stop_reason:
            return
        self._stop_reason, self._status = reason, status
        self._listen(events.Stopping(reason=reason))
        if self._executor is not None:
            self._executor.stop(Outcome.INTERRUPTED)
        elif self._starting is not None:
            self._starting.cancel()

    async def run(self) -> events.RunReport:
        """Run to the end. Returns also after an interruption, a spent budget or an error of the endpoint.

        Raises:
            StoreError: the run directory can no longer be written; what was written is intact.
        """
        try:
            return await self._run()
        finally:
            self._store.close()

    async def _run(self) -> events.RunReport:
        begun = time.monotonic()
        self._listen(self._planned)
        for text in self._warnings:
            self._listen(events.Warned(text=text))
        if self._resumed is not None:
            self._listen(self._resumed)
        if not self._specs and self._resumed is not None:
            self._listen(events.AllDone())
        if self._specs and not self._stop_reason:
            await self._mill()
        return await self._finish(time.monotonic() - begun)

    async def _mill(self) -> None:
        self._starting = asyncio.create_task(self._make_executor())
        try:
            self._executor = await self._starting
            await self._run_all(self._executor)
        except asyncio.CancelledError:
            if not self._stop_reason:
                raise
        finally:
            if self._executor is not None:
                await self._executor.close()
            if self._release is not None:
                await self._release()
        if isinstance(self._error, StoreError):
            raise self._error

    async def _run_all(self, executor: Executor) -> None:
        ticking = asyncio.create_task(self._tick(executor))
        writing: set[asyncio.Task[None]] = set()
        try:
            async for finished in executor.run(iter(self._specs), self._batches.started):
                if len(writing) >= UNWRITTEN_LIMIT:
                    await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self._keep(finished))
                writing.add(task)
                task.add_done_callback(writing.discard)
                self._judge(finished, executor)
        finally:
            ticking.cancel()
            if writing:
                await asyncio.wait(writing)

    async def _keep(self, finished: Finished) -> None:
        """Make one outcome durable, then tell of it."""
        try:
            await self._store.append(finished)
        except StoreError as error:
            # Results are at risk: nothing more is started, what runs is ended.
            if self._error is None and self._executor is not None:
                self._error = error
                self._executor.stop(Outcome.INTERRUPTED)
            return
        self._listen(
            events.SessionEnded(
                prompt_index=finished.prompt_index,
                sample=finished.sample,
                batch=finished.batch,
                state=finished.state,
                outcome=finished.outcome,
                partial=finished.partial,
                reason=finished.reason,
                prompt=self._texts[finished.prompt_index][: self._config.log_prefix_chars],
                turns=finished.turns,
                seconds=finished.seconds,
                prompt_tokens=finished.prompt_tokens,
                completion_tokens=finished.completion_tokens,
                cost_usd=finished.cost_usd,
                cost_known=finished.cost_known,
            )
        )
        self._batches.ended(finished.batch)

    def _judge(self, finished: Finished, executor: Executor) -> None:
        """Stop where going on is useless: the endpoint refuses everyone, or the budget is spent."""
        self._ended += 1
        if finished.state != "failed":
            self._useful += 1
        elif finished.outcome == Outcome.BUDGET:
            if not self._stop_reason:
                self._stop_reason, self._status = finished.reason, 4
                self._listen(events.Stopping(reason=finished.reason))
            executor.hold()
        elif finished.fatal and self._error is None:
            self._fatal.append(finished.fatal)
            if not self._useful and len(self._fatal) >= min(FIRST_SESSIONS, len(self._specs)) == self._ended:
                self._error = GristmillError(finished.fatal)
                executor.stop(Outcome.INTERRUPTED)
            elif self._useful:
                # It worked before: what runs may end, nothing new is paid for.
                self._error = GristmillError(finished.fatal)
                executor.hold()

    async def _tick(self, executor: Executor) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            self._listen(events.Progress(in_flight=executor.in_flight, limit=executor.limit, refused=executor.refused))

    async def _finish(self, seconds: float) -> events.RunReport:
        report = await asyncio.to_thread(
            self._store.finalize, self._listen, seconds, self._stop_reason or str(self._error or "finished")
        )
        statistics: dict[str, Any] = report.statistics
        counts = statistics["reconcile"]
        self._listen(
            events.RunEnded(
                processed=self._ended,
                seconds=seconds,
                sessions=counts["sessions"],
                kept=counts["kept"],
                discarded=counts["discarded"],
                filtered=counts["filtered"],
                failed=counts["failed"],
                pending=counts["pending"],
                merged_rows=report.rows,
                merged_files=report.files,
                directory=str(self._store.layout.root),
                files=report.written,
                statistics=statistics,
            )
        )
        status = self._status
        if self._error is not None:
            status = 1
        elif not status and (counts["failed"] or counts["pending"]):
            status = 3
        error = self._error
        return events.RunReport(
            exit_status=status,
            statistics=statistics,
            error=error.message if error else "",
            mend=error.mend if error else "",
        )


class _Batches:
    """Tells when the first session of a batch starts and the last one ends."""

    def __init__(self, specs: list[SessionSpec], listen: events.Listener) -> None:
        self._listen = listen
        self._prompts: dict[int, set[int]] = {}
        self._left: dict[int, int] = {}
        self._started: set[int] = set()
        for spec in specs:
            self._prompts.setdefault(spec.batch, set()).add(spec.task.index)
            self._left[spec.batch] = self._left.get(spec.batch, 0) + 1

    def started(self, spec: SessionSpec) -> None:
        if spec.batch not in self._started:
            self._started.add(spec.batch)
            self._listen(events.BatchStarted(batch=spec.batch, prompts=len(self._prompts[spec.batch])))

    def ended(self, batch: int) -> None:
        self._left[batch] -= 1
        if not self._left[batch]:
            self._listen(events.BatchCompleted(batch=batch, prompts=len(self._prompts[batch])))


def number_batches(prompts: Iterator[int], batch_size: int, first: int) -> dict[int, int]:
    """The batch of each prompt index: `batch_size` consecutive ones each, numbered from `first`."""
    order = dict.fromkeys(prompts)
    return {index: first + position // batch_size for position, index in enumerate(order)}
