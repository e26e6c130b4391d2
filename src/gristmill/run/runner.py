"""The run: owed prompts → sessions → durable rows → merge → statistics. Prompts are scheduled; batches are files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from gristmill import events
from gristmill.config import RunConfig
from gristmill.errors import GristmillError, StoreError
from gristmill.run.executor import Executor
from gristmill.run.store import RunStore
from gristmill.session.spec import Finished, SessionSpec
from gristmill.types import Outcome

FATAL_SESSIONS = 3  # so many sessions with an error that every other would meet, and no useful one between, end the run
UNWRITTEN_LIMIT = 512  # rows that may wait for the disk before no further result is taken
PROGRESS_SECONDS = 0.5

MakeExecutor = Callable[[], Coroutine[None, None, Executor]]


class Runner:
    """One invocation of a run.

    Args:
        config: its settings.
        planned: the figures of the summary.
        store: the run directory, locked by us.
        specs: every session that is owed, in order; made as they are asked for.
        batches: which batch each of them belongs to.
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
        specs: Iterable[SessionSpec],
        batches: Batches,
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
        self._sessions = len(batches.of)
        self._make_executor = make_executor
        self._listen = _whatever_it_does(listen)
        self._resumed = resumed
        self._warnings = warnings
        self._release = release
        self._executor: Executor | None = None
        self._batches = _Progress(batches, self._listen)
        self._texts: dict[tuple[int, int], str] = {}  # the beginning of the prompt of each session in flight
        self._ended = 0
        self._useful = 0
        self._fatal = 0  # errors that every session would meet, since the last useful one
        self._status = 0
        self._error: GristmillError | None = None
        self._stop_reason = ""
        self._stopped = False
        self._starting: asyncio.Task[Executor] | None = None

    def stop(self, reason: str, status: int) -> None:
        """End the run cleanly: what runs is recorded as interrupted and stays owed."""
        if self._stopped:
            return
        self._stopped = True  # a spent budget only keeps new sessions from starting, so it may have come before
        self._stop_reason, self._status = reason, status
        if self._executor is not None:
            self._executor.stop(Outcome.INTERRUPTED)
        elif self._starting is not None:
            self._starting.cancel()
        self._listen(events.Stopping(reason=reason))

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
        if not self._sessions and self._resumed is not None:
            self._listen(events.AllDone())
        if self._sessions and not self._stop_reason:
            await self._mill()
        return await self._finish(time.monotonic() - begun)

    async def _mill(self) -> None:
        self._starting = asyncio.create_task(self._make_executor())
        try:
            self._executor = await self._starting
            if not self._stopped:  # it may have come when this task had not gone on yet
                await self._run_all(self._executor)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        except GristmillError as error:
            if not self._ended:
                raise
            self._error = self._error or error  # what there is gets merged all the same
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
            async for finished in executor.run(iter(self._specs), self._started):
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

    def _started(self, spec: SessionSpec) -> None:
        self._texts[spec.task.index, spec.sample] = spec.task.text[: self._config.log_prefix_chars]
        self._batches.started(spec.batch)

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
                prompt=self._texts.pop((finished.prompt_index, finished.sample), ""),
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
            self._useful, self._fatal = self._useful + 1, 0
        elif finished.outcome == Outcome.BUDGET:
            if not self._stop_reason:
                self._stop_reason, self._status = finished.reason, 4
                self._listen(events.Stopping(reason=finished.reason))
            executor.hold()
        self._fatal += bool(finished.fatal)
        if not finished.fatal or self._fatal < min(FATAL_SESSIONS, self._sessions) or self._error is not None:
            return
        self._error = GristmillError(finished.fatal)
        if self._useful:
            executor.hold()  # it worked before: what runs may end, nothing new is paid for
        else:
            executor.stop(Outcome.INTERRUPTED)

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


def _whatever_it_does(listen: events.Listener) -> events.Listener:
    """The listener, where a terminal that has gone costs its lines and nothing else."""

    def tell(event: events.Event) -> None:
        with contextlib.suppress(OSError):
            listen(event)

    return tell


class Batches:
    """Which batch file each session goes to: `batch_size` consecutive prompts each, numbered from `first`.

    `of` has the batch of each session, in order; `prompts` and `sessions` say how many of both each batch has.
    """

    def __init__(self, prompts: Iterable[int], batch_size: int, first: int) -> None:
        self.of = array("l")
        self.prompts: Counter[int] = Counter()
        self.sessions: Counter[int] = Counter()
        position, last = -1, None
        for index in prompts:
            position += index != last
            batch = first + position // batch_size
            self.prompts[batch] += index != last
            self.sessions[batch] += 1
            self.of.append(batch)
            last = index


class _Progress:
    """Tells when the first session of a batch starts and the last one ends."""

    def __init__(self, batches: Batches, listen: events.Listener) -> None:
        self._listen = listen
        self._prompts = batches.prompts
        self._left = batches.sessions.copy()
        self._begun: set[int] = set()

    def started(self, batch: int) -> None:
        if batch not in self._begun:
            self._begun.add(batch)
            self._listen(events.BatchStarted(batch=batch, prompts=self._prompts[batch]))

    def ended(self, batch: int) -> None:
        self._left[batch] -= 1
        if not self._left[batch]:
            self._listen(events.BatchCompleted(batch=batch, prompts=self._prompts[batch]))
