"""The session's edge: whatever goes wrong inside becomes a row, once; what a session asks is counted as its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zstandard

from gristmill.config import SandboxConfig
from gristmill.errors import SandboxError
from gristmill.model.base import Load, Reply, Request
from gristmill.quality.base import ActiveFilter, Filter
from gristmill.run.worker import Kit, Running, WorkerLoop
from gristmill.sandbox.base import SandboxSpec
from gristmill.sandbox.host import HostSandboxes
from gristmill.session.record import SessionSettings
from gristmill.session.spec import Finished, SessionSpec
from gristmill.session.summary import RowShape
from gristmill.task import Task
from gristmill.tools.base import Tool, ToolContext, Toolset
from gristmill.types import Message, Outcome, ToolCall, ToolSchema, Usage


class Model:
    """Calls the tool `do` once, then says that it is done."""

    load: Load | None = None

    def __init__(self, reply: Callable[[Reply], Reply] = lambda reply: reply) -> None:
        self._reply = reply

    async def complete(self, request: Request) -> Reply:
        message = Message(role="assistant", content="done", reasoning="r")
        if request.tools and request.messages[-1].role == "user":
            message = Message(role="assistant", reasoning="r", tool_calls=(ToolCall(id="c", name="do"),))
        return self._reply(Reply(message=message, finish="stop", usage=Usage(prompt_tokens=10, cost_usd=0.5)))

    async def close(self) -> None:
        return None


class NoSandboxes(HostSandboxes):
    def make(self, spec: SandboxSpec) -> Any:
        raise SandboxError("There is no such image.")


def kit(run: Any = None, **changed: Any) -> Kit:
    schema = ToolSchema(name="do", description="Does it.", parameters={"type": "object", "properties": {}})
    toolset = Toolset(name="own", tools=(Tool(schema=schema, toolset="own", run=run or _fine),))
    fields: dict[str, Any] = {
        "model": Model(),
        "sandboxes": HostSandboxes(),
        "sandbox": SandboxConfig(),
        "toolsets": {"own": toolset},
        "settings": SessionSettings(),
        "shape": RowShape(model="m", known_tools=("do",)),
        "filters": (),
        "run_id": "r",
    }
    return Kit(**(fields | changed))


async def _fine(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"fine": True}


SPEC = SessionSpec(
    task=Task(index=0, line=1, key="k", text="p"),
    sample=0,
    batch=0,
    attempt=1,
    toolsets=("own",),
    probability=1.0,
    seed=1,
)


async def work(given: Kit, spec: SessionSpec = SPEC) -> Finished:
    try:
        return await asyncio.wait_for(Running(spec, given).work(), 20)
    finally:
        await given.close()


def record_of(finished: Finished) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zstandard.ZstdDecompressor().decompress(finished.record, 1 << 30))
    return found


async def test_a_sandbox_that_cannot_be_made_is_this_sessions_row() -> None:
    finished = await work(kit(sandboxes=NoSandboxes()))
    assert (finished.state, finished.outcome) == ("failed", "sandbox_error")
    assert finished.reason == "There is no such image."
    assert json.loads(finished.row)["error"]["type"] == "sandbox_error"


async def test_a_toolset_that_the_worker_lacks_is_this_sessions_row() -> None:
    finished = await work(kit(), msgspec.structs.replace(SPEC, toolsets=("nope",)))
    assert finished.outcome == "internal_error" and "nope" in finished.reason


@pytest.mark.parametrize(
    "error", [SystemExit(3), MemoryError("m"), RecursionError("r"), KeyError("k"), GeneratorExit()]
)
async def test_du_06_whatever_a_tool_raises_stays_in_its_session(error: BaseException) -> None:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        raise error

    finished = await work(kit(run))
    assert finished.outcome in ("completed", "internal_error")
    if finished.outcome == "internal_error":
        assert "Traceback" in record_of(finished)["detail"]
        assert "Traceback" not in finished.reason and b"Traceback" not in finished.row


async def test_a_tool_that_cancels_its_session_fails_it() -> None:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)
        return {}

    finished = await work(kit(run))
    assert finished.outcome == "internal_error"


async def test_a_filter_that_raises_fails_the_session_and_its_record_is_kept() -> None:
    def judge(row: Any, context: Any) -> str:
        raise KeyError("half a character \ud800")

    broken = ActiveFilter(Filter("broken", "session", judge, "breaks"), None)
    finished = await work(kit(filters=(broken,)))
    assert (finished.state, finished.outcome) == ("failed", "internal_error")
    assert "KeyError" in finished.reason
    msgspec.msgpack.encode(finished)  # fit for a frame
    record = record_of(finished)
    assert len(record["messages"]) == 4 and "Traceback" in record["detail"]


async def test_du_08_a_record_that_is_nested_too_deeply_is_stored_without_that() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    finished = await work(kit(model=Model(lambda reply: msgspec.structs.replace(reply, raw={"odd": deep}))))
    assert finished.outcome == "completed"
    assert [turn["reply"]["usage"]["prompt_tokens"] for turn in record_of(finished)["turns"]] == [10, 10]


async def test_what_a_tool_asks_of_a_vision_model_is_the_sessions_cost() -> None:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        assert context.vision is not None and context.vision.model == "eye"
        return {"seen": await context.vision.ask("What is it?", ["data:image/png;base64,"])}

    finished = await work(kit(run, vision=Model(), vision_name="eye"))
    assert finished.outcome == "completed" and finished.turns == 2
    assert (finished.prompt_tokens, finished.cost_usd) == (30, 1.5)


async def test_stopped_before_it_began_nothing_is_kept_and_later_what_there_is() -> None:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    given: list[Finished | None] = []
    running = WorkerLoop(kit(run), lambda lease, finished: given.append(finished))
    running.start(1, SPEC)
    running.stop(Outcome.INTERRUPTED)
    await asyncio.wait_for(running.idle(), 10)
    running.start(2, SPEC)
    await asyncio.sleep(0.1)
    running.stop(Outcome.INTERRUPTED)
    await asyncio.wait_for(running.idle(), 10)
    assert given[0] is None
    assert given[1] is not None and given[1].outcome == "interrupted" and given[1].prompt_tokens == 10


async def test_no_session_begins_while_requests_wait_for_the_endpoint() -> None:
    given: list[int] = []
    model = Model()
    model.load = Load(limit=2, in_flight=2, waiting=2, calls=0, refused=0)
    running = WorkerLoop(kit(model=model), lambda lease, finished: given.append(lease if finished else -lease))
    for lease in range(1, 6):
        running.start(lease, SPEC)
    await asyncio.sleep(0.1)
    assert (given, running.in_flight) == ([], 5)
    model.load = msgspec.structs.replace(model.load, waiting=0)
    while len(given) < 3:
        await asyncio.sleep(0.001)
    model.load = msgspec.structs.replace(model.load, waiting=2)
    await asyncio.sleep(0.1)
    assert sorted(given) == [1, 2, 3, 4] and running.in_flight == 1
    running.stop(Outcome.INTERRUPTED)
    await asyncio.wait_for(running.idle(), 10)
    assert given[-1] == -5  # there is nothing of it to keep
    running.start(6, SPEC)
    await running.abandon()
    assert running.in_flight == 0


async def test_closing_goes_on_after_a_closer_that_fails() -> None:
    closed: list[str] = []

    async def fails() -> None:
        raise OSError("no")

    async def works() -> None:
        closed.append("works")

    given = kit(shared_closers=[works, fails])
    with pytest.raises(OSError, match="no"):
        await given.close()
    assert closed == ["works"]
