"""One worker: takes session specs, gives back finished sessions. `work` is where errors become rows, once.

The same code runs in a worker process, in the runner's own process and in a test: it needs a `Kit` and an event loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from gristmill.config import SandboxConfig
from gristmill.errors import SandboxError
from gristmill.model.base import Model, Reply, Request
from gristmill.quality.base import ActiveFilter
from gristmill.sandbox.base import Sandbox, SandboxProvider, SandboxSpec
from gristmill.sandbox.lazy import LazySandbox
from gristmill.session.loop import Session
from gristmill.session.record import Gate, SessionRecord, SessionSettings, plausible
from gristmill.session.spec import Finished, SessionSpec
from gristmill.session.summary import RowShape, finish
from gristmill.tools.base import AskModel, Tool, ToolContext, Toolset
from gristmill.tools.toolbox import Toolbox
from gristmill.types import ErrorInfo, Message, Outcome, Usage

LOOK_SECONDS = 0.02  # between two looks whether the endpoint has room for more sessions
CLOSE_SECONDS = 20.0  # the longest that a session's tools may take to close; its sandbox has a bound of its own
REASON_LIMIT = 1000  # characters of an unforeseen error that its row shows


@dataclass
class Kit:
    """All that the sessions of one worker share. Made by `build.make_kit`, closed once."""

    model: Model
    sandboxes: SandboxProvider
    sandbox: SandboxConfig
    toolsets: Mapping[str, Toolset]
    settings: SessionSettings
    shape: RowShape
    filters: tuple[ActiveFilter, ...]
    run_id: str
    tool_settings: Mapping[str, str] = field(default_factory=dict)
    allow_private_urls: bool = False
    vision: Model | None = None  # what looks at pictures, and its name
    vision_name: str = ""
    gate: Gate | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    shared_closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def tools(self, name: str) -> tuple[Tool, ...]:
        """The tools that a drawn name stands for: a toolset's, or the single one of `tool:NAME`."""
        if name.startswith("tool:"):
            single = name.removeprefix("tool:")
            return tuple(tool for toolset in self.toolsets.values() for tool in toolset.tools if tool.name == single)[
                :1
            ]
        return self.toolsets[name].tools

    def load(self) -> tuple[int, int]:
        """How many requests the endpoint takes from this worker at present (0: not known), and how many it refused."""
        load = self.model.load
        return (load.limit, load.refused) if load is not None else (0, 0)

    def room(self) -> int:
        """How many sessions may begin now: none while as many requests wait for the endpoint as it takes at once."""
        load = self.model.load
        if load is None:
            return sys.maxsize
        return load.limit if load.waiting < load.limit else 0

    async def close(self) -> None:
        """Give back what the worker holds, all of it whatever goes wrong."""
        async with AsyncExitStack() as stack:
            stack.callback(self.sandboxes.close)
            stack.push_async_callback(self.model.close)
            for closer in self.shared_closers:
                stack.push_async_callback(closer)


class Running:
    """A session in flight, so that it can be stopped in a way that keeps what there is of it."""

    def __init__(self, spec: SessionSpec, kit: Kit) -> None:
        self.spec = spec
        self.kit = kit
        self.session: Session | None = None
        self._playing: asyncio.Task[SessionRecord] | None = None
        self._stopped: Outcome | None = None

    def stop(self, outcome: Outcome) -> None:
        """End it now and record it with this outcome (`interrupted` or `budget`)."""
        self._stopped = outcome
        if self._playing is not None and self.session is not None and not self._playing.done():
            self.session.interrupt(outcome)
            self._playing.cancel()

    async def work(self) -> Finished:
        """Run the session and encode it. Never raises for anything that happens inside the session."""
        try:
            session, toolbox, sandbox = self._make()
        except Exception as error:  # noqa: BLE001 - the session's edge: a spec that cannot be served is this session's row
            record = SessionRecord(spec=self.spec, tools=(), messages=[], started=time.time())
            _blame(record, error)
            return self._encode(record)
        record = session.record
        self.session = session
        if self._stopped is not None:
            session.interrupt(self._stopped)
        self._playing = asyncio.create_task(_play(session))
        if self._stopped is not None:
            self._playing.cancel()
        try:
            await asyncio.shield(self._playing)
        except asyncio.CancelledError:
            self._playing.cancel()
            await asyncio.wait([self._playing])
            if record.outcome not in (Outcome.INTERRUPTED, Outcome.BUDGET):
                me = asyncio.current_task()
                if self._stopped is not None or me is None or me.cancelling():
                    await _close(toolbox, sandbox, record)
                    raise
                _blame(record, RuntimeError("a tool cancelled the session"))
        await _close(toolbox, sandbox, record)
        return self._encode(record)

    def _make(self) -> tuple[Session, Toolbox, Sandbox]:
        spec, kit = self.spec, self.kit
        sandbox = LazySandbox(kit.sandboxes.make(self._sandbox_spec()))
        context = ToolContext(
            sandbox=sandbox,
            session_id=sandbox.spec.session_id,
            terminal_timeout=kit.sandbox.terminal_timeout,
            allow_private_urls=kit.allow_private_urls,
            settings=kit.tool_settings,
            shared=kit.shared,
            shared_closers=kit.shared_closers,
        )
        tools = [tool for name in spec.toolsets for tool in kit.tools(name)]
        toolbox = Toolbox(tools, context)
        session = Session(spec, kit.model, toolbox, sandbox, kit.settings, kit.gate, eager=self._eager())
        if kit.vision is not None:
            context.vision = AskModel(OneAnswer(kit.vision, session.record, kit.gate).ask, kit.vision_name)
        return session, toolbox, sandbox

    def _encode(self, record: SessionRecord) -> Finished:
        try:
            return finish(record, self.kit.shape, self.kit.filters)
        except Exception as error:  # noqa: BLE001 - the session's edge: a filter of somebody else's, say
            _blame(record, error)
            return finish(record, self.kit.shape, ())

    def _eager(self) -> bool:
        """Whether the sandbox must be there before the first model call: where it may fail, and money would be lost."""
        task = self.spec.task
        return bool(task.cwd or task.image or self.kit.sandboxes.capabilities.images)

    def _sandbox_spec(self) -> SandboxSpec:
        spec, sandbox = self.spec, self.kit.sandbox
        return SandboxSpec(
            session_id=f"{spec.task.index}-{spec.sample}-{spec.attempt}",
            run_id=self.kit.run_id,
            image=spec.task.image or (sandbox.image if self.kit.sandboxes.capabilities.images else ""),
            cwd=spec.task.cwd or sandbox.cwd,
            network=sandbox.network,
            limits=sandbox.limits,
        )


async def _play(session: Session) -> SessionRecord:
    record = session.record
    try:
        return await session.run()
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the session's edge: a fault of ours is this session's row
        _blame(record, error)
        return record


def _blame(record: SessionRecord, error: BaseException) -> None:
    """End the session as a failure because of this error; its traceback stands in the record alone."""
    record.outcome, record.reason = Outcome.INTERNAL_ERROR, f"{type(error).__name__}: {error}"[:REASON_LIMIT]
    if isinstance(error, SandboxError):
        record.outcome, record.reason = Outcome.SANDBOX_ERROR, str(error)
    record.error = ErrorInfo(type=str(record.outcome), message=record.reason)
    record.detail += "".join(traceback.format_exception(error))


async def _close(toolbox: Toolbox, sandbox: Sandbox, record: SessionRecord) -> None:
    """Close tools, then the sandbox; what goes wrong here is noted and never costs the session its row."""
    for name, close in (("tools", toolbox.close), ("sandbox", sandbox.stop)):
        try:
            await asyncio.wait_for(close(), CLOSE_SECONDS)
        except Exception as error:  # noqa: BLE001 - the session's edge: see the docstring
            record.detail += f"\nwhile closing the {name}: {type(error).__name__}: {error}"


class OneAnswer:
    """`AskModel` over a `Model`: a question with pictures, one text back; its cost is the session's and the run's."""

    def __init__(self, model: Model, record: SessionRecord, gate: Gate | None) -> None:
        self._model = model
        self._record = record
        self._gate = gate

    async def ask(self, question: str, pictures: list[str]) -> str:
        """Ask once. Raises `ModelError`, or `BudgetSpent`."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
        parts += [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
        reply: Reply | None = None
        if self._gate is not None:
            await self._gate.reserve()
        try:
            reply = await self._model.complete(Request(messages=[Message(role="user", content=parts)]))
        finally:
            usage = plausible(reply.usage) if reply is not None else None
            if self._gate is not None:
                self._gate.settle(usage)
            self._record.usage += usage or Usage()
        return str(reply.message.content)


class WorkerLoop:
    """Runs leased sessions side by side and hands each result to `give`.

    A session begins only when the endpoint has room for its requests: waiting inside, it would use up its time, and all
    sessions of a slow endpoint would end half-done. Used by the worker process and by the executor of the runner's own.
    """

    def __init__(self, kit: Kit, give: Callable[[int, Finished | None], None]) -> None:
        self._kit = kit
        self._give = give
        self._leased: deque[tuple[int, SessionSpec]] = deque()
        self._running: dict[int, tuple[Running, asyncio.Task[None]]] = {}
        self._beginning: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Sessions that run, or are to run."""
        return len(self._running) + len(self._leased)

    def start(self, lease: int, spec: SessionSpec) -> None:
        """Run a session; its result is given under this lease number, None where nothing of it could be kept."""
        self._idle.clear()
        self._leased.append((lease, spec))
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._begin())

    async def _begin(self) -> None:
        """Begin what is leased, at each look no more than there is room for."""
        while self._leased:
            for _ in range(min(len(self._leased), self._kit.room())):
                lease, spec = self._leased.popleft()
                running = Running(spec, self._kit)
                self._running[lease] = (running, asyncio.create_task(self._run(lease, running)))
            await asyncio.sleep(LOOK_SECONDS if self._leased else 0)
        self._beginning = None

    async def _run(self, lease: int, running: Running) -> None:
        finished: Finished | None = None
        try:
            finished = await running.work()
        finally:
            del self._running[lease]
            self._given(lease, finished)

    def _given(self, lease: int, finished: Finished | None) -> None:
        if not self.in_flight:
            self._idle.set()
        self._give(lease, finished)

    def stop(self, outcome: Outcome) -> None:
        """End every session now, recorded with this outcome; of those that have not begun there is nothing to keep."""
        while self._leased:
            self._given(self._leased.popleft()[0], None)
        for running, _ in list(self._running.values()):
            running.stop(outcome)

    async def idle(self) -> None:
        """Wait until no session runs."""
        await self._idle.wait()

    async def abandon(self) -> None:
        """Cancel every session without keeping anything, and wait until their sandboxes are gone."""
        self._leased.clear()
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
