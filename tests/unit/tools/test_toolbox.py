"""The toolbox: order, overlap, one result per call, limits, failures, cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from gristmill import plugins
from gristmill.errors import ErrorKind, ModelError, SandboxError
from gristmill.sandbox.base import SandboxProvider, SandboxSpec
from gristmill.sandbox.bubblewrap import BubblewrapSandboxes
from gristmill.sandbox.host import HostSandboxes
from gristmill.tools.base import Access, Tool, ToolContext, ToolOutput
from gristmill.tools.builtin import BUILTIN_TOOLSETS, TOOL_TO_TOOLSET_MAP
from gristmill.tools.toolbox import Toolbox
from gristmill.types import ToolCall, ToolSchema
from support.toolboxes import Bench, bench

ANY_OBJECT = {"type": "object", "properties": {}, "additionalProperties": True}


def make_tool(
    name: str,
    run: Callable[[ToolContext, dict[str, Any]], Awaitable[ToolOutput]],
    *,
    access: Access | None = None,
    limit: int = 100_000,
) -> Tool:
    return Tool(
        schema=ToolSchema(name=name, description=name, parameters=ANY_OBJECT),
        toolset="test",
        run=run,
        access=lambda arguments: access or Access(tuple(arguments.get("path", ())), bool(arguments.get("writes"))),
        limit=limit,
    )


def giver(name: str, output: Any, limit: int = 100_000) -> Tool:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        if isinstance(output, BaseException):
            raise output
        return output  # type: ignore[no-any-return]

    return make_tool(name, run, limit=limit)


class Recorder:
    """A tool whose calls overlap visibly."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tool = make_tool("step", self.run)

    async def run(self, context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        name = arguments["name"]
        self.events.append(f"+{name}")
        await asyncio.sleep(arguments.get("seconds", 0.02))
        self.events.append(f"-{name}")
        return {"name": name}


async def test_results_come_in_call_order_whatever_ends_first() -> None:
    recorder = Recorder()
    async with bench(recorder.tool, toolsets=()) as made:
        results = await made.all(*(("step", {"name": n, "seconds": 0.05 - n / 100}) for n in range(5)))
    assert [orjson.loads(r.text)["name"] for r in results] == [0, 1, 2, 3, 4]
    assert [r.call_id for r in results] == ["c1", "c2", "c3", "c4", "c5"]
    assert recorder.events[:5] == ["+0", "+1", "+2", "+3", "+4"]
    assert recorder.events[5:] == ["-4", "-3", "-2", "-1", "-0"]
    assert all(0.005 < r.seconds < 0.5 for r in results)


async def test_conflicting_calls_run_in_call_order_and_others_at_once() -> None:
    recorder = Recorder()
    async with bench(recorder.tool, toolsets=()) as made:
        await made.all(
            ("step", {"name": "shell", "path": ["s"], "writes": True}),
            ("step", {"name": "read1", "path": ["s", "a"]}),
            ("step", {"name": "read2", "path": ["s", "b"]}),
            ("step", {"name": "write", "path": ["s", "a"], "writes": True}),
            ("step", {"name": "web"}),
            ("step", {"name": "last", "path": ["s"], "writes": True}),
        )
    events = recorder.events
    place = {event: index for index, event in enumerate(events)}
    assert events[:2] == ["+shell", "+web"]
    assert place["-shell"] < place["+read1"] < place["-read1"]
    assert place["+read2"] < place["-read1"]
    assert place["-read1"] < place["+write"]
    assert max(place["-write"], place["-read2"]) < place["+last"]


async def test_schemas_are_in_a_fixed_order_and_a_name_is_offered_once() -> None:
    first, second = giver("mine", {"n": 1}), giver("mine", {"n": 2})
    async with bench(first, second) as made:
        names = [schema.name for schema in made.toolbox.schemas]
        assert names == ["terminal", "process", "read_file", "write_file", "patch", "search_files", "mine"]
        assert (await made.run("mine"))["n"] == 1


@pytest.mark.parametrize(
    ("output", "text", "ok"),
    [
        (None, '{"error":"The tool returned nothing."}', False),
        ("", '{"error":"The tool returned nothing."}', False),
        (" \n", '{"error":"The tool returned nothing."}', False),
        ([], "[]", True),
        ({}, "{}", True),
        (0, "0", True),
        (False, "false", True),
        ("plain", "plain", True),
        ("a\0b\ud800", "a\\x00b\ufffd", True),
        ({"a": "\0\ud800"}, '{"a":"\\u0000\ufffd"}', True),
        ("error: no such thing", "error: no such thing", False),
        ("There was an Error: no", "There was an Error: no", True),
        ('{"error": "down"}', '{"error": "down"}', False),
        ('{"error": null}', '{"error": null}', True),
        ('{"error": ', '{"error": ', True),
        ({"error": None}, '{"error":null}', True),
        ({"success": False}, '{"success":false}', False),
        ({"content": {"error": "x"}}, '{"content":{"error":"x"}}', False),
        ({"content": "error: in a file"}, '{"content":"error: in a file"}', True),
    ],
)
async def test_whatever_a_tool_returns_is_one_judged_text(output: Any, text: str, ok: bool) -> None:
    async with bench(giver("give", output), toolsets=()) as made:
        result = await made.result("give", {})
    assert (result.text, result.ok, bool(result.error)) == (text, ok, not ok)
    assert result.known and result.valid


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("the value is odd"), "the value is odd"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (KeyError("k"), "KeyError: 'k'"),
        (TimeoutError(), "The tool timed out."),
        (RuntimeError(), "RuntimeError"),
        (ModelError("the vision model is down", ErrorKind.TRANSIENT), "the vision model is down"),
        (asyncio.CancelledError(), "The tool was cancelled from within."),
    ],
)
async def test_an_exception_of_a_tool_is_its_result(error: BaseException, text: str) -> None:
    async with bench(giver("boom", error), giver("fine", {"n": 1}), toolsets=()) as made:
        boom, fine = await made.all(("boom", {}), ("fine", {}))
        alone = await made.result("boom", {})
    assert (boom.error, boom.ok, boom.valid) == (text, False, True)
    assert orjson.loads(alone.text) == {"error": text}
    assert fine.ok


async def test_a_tool_whose_access_raises_still_gives_a_result() -> None:
    def access(arguments: dict[str, Any]) -> Access:
        raise KeyError("path")

    async def run(context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        return {"n": 1}

    schema = ToolSchema(name="odd", description="", parameters=ANY_OBJECT)
    async with bench(Tool(schema=schema, toolset="t", run=run, access=access), toolsets=()) as made:
        first, second = await made.all(("odd", {}), ("odd", {}))
    assert first.ok and second.ok


async def test_a_sandbox_error_passes_through_after_the_others_were_ended() -> None:
    recorder = Recorder()
    async with bench(recorder.tool, giver("dies", SandboxError("gone")), toolsets=()) as made:
        before = asyncio.all_tasks()  # the sandbox may have some of its own
        with pytest.raises(SandboxError, match="gone"):
            await made.all(
                ("step", {"name": "long", "seconds": 30}),
                ("dies", {"path": ["s"], "writes": True}),
                ("step", {"name": "after", "path": ["s"]}),
            )
    assert recorder.events == ["+long"]
    assert asyncio.all_tasks() <= before


async def test_cancellation_leaves_nothing_running() -> None:
    recorder = Recorder()
    async with bench(recorder.tool, toolsets=()) as made:
        before = asyncio.all_tasks()  # the sandbox may have some of its own
        for calls in (1, 3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await made.all(
                        *(("step", {"name": n, "seconds": 30, "path": ["s"], "writes": True}) for n in range(calls))
                    )
    assert recorder.events == ["+0", "+0"]
    assert asyncio.all_tasks() <= before


async def test_refused_and_unknown_calls_run_nothing() -> None:
    async with bench(giver("give", {})) as made:
        unknown, refused, fine = await made.all(
            ("terminl", '{"b" : 1}'), ("terminal", {"cmd": "touch x"}), ("terminal", {"command": "ls"})
        )
    assert (unknown.known, unknown.valid, unknown.ok, unknown.arguments) == (False, False, False, '{"b":1}')
    assert "Available tools: terminal, process, read_file" in unknown.error
    assert (refused.known, refused.valid, refused.ok, refused.arguments) == (True, False, False, '{"cmd": "touch x"}')
    assert "'command' is missing" in refused.error
    assert "There is no argument 'cmd'" in refused.text
    assert (fine.ok, orjson.loads(fine.text)["output"]) == (True, "")


# ---- results over the limit


async def test_a_long_result_is_kept_whole_in_the_sandbox_and_previewed() -> None:
    whole = {"rows": [f"é😀\0 row {number}" for number in range(20_000)], "error": "half of it"}
    async with bench(giver("long", whole)) as made:
        result = await made.result("long", {})
        shown = orjson.loads(result.text)
        assert len(result.text) < 12_000
        assert (shown["truncated"], shown["error"], result.ok) == (True, "half of it", False)
        assert shown["saved_to"] == f"{made.sandbox.workspace}/.gristmill/0001.json"
        assert orjson.loads(await made.sandbox.read(shown["saved_to"], 10_000_000)) == whole
        assert shown["preview"].startswith('{"rows":["é😀')
        await made.shell("git init -q . && touch mine")
        assert await made.shell("git status --porcelain") == "?? mine\n"


async def test_a_long_text_is_kept_as_text() -> None:
    text = "é😀 line\n" * 20_000
    async with bench(giver("long", text), giver("short", "x")) as made:
        _, result = await made.all(("short", {}), ("long", {}))
        path = f"{made.sandbox.workspace}/.gristmill/0002.txt"
        assert (await made.sandbox.read(path, 10_000_000)).decode() == text
    assert result.ok
    assert len(result.text) <= 4_000
    assert result.text.startswith("é😀 line\n")
    assert path in result.text


async def test_a_result_that_cannot_be_saved_is_cut_within_the_limit() -> None:
    values: list[Any] = ['x\\"' * 50_000, {"a": 'x\\"' * 50_000}]
    async with bench(*(giver(f"t{n}", value, limit=9_000) for n, value in enumerate(values))) as made:
        await made.shell("touch .gristmill")  # a file where the folder should be
        for number in range(2):
            result = await made.result(f"t{number}", {})
            assert 3_000 < len(result.text) <= 9_000
            assert "could not be saved" in result.text


@pytest.mark.parametrize("limit", [50, 300, 1_000])
async def test_no_result_is_longer_than_the_limit_of_its_tool(limit: int) -> None:
    async with bench(giver("a", {"error": '"' * 5_000}, limit), giver("b", "\ud800" * 5_000, limit)) as made:
        for name in "ab":
            assert len((await made.result(name, {})).text) <= limit


# ---- the table, and closing


def test_every_tool_of_a_builtin_toolset_is_in_the_table() -> None:
    assert len(TOOL_TO_TOOLSET_MAP) == 20
    for name in ("terminal", "file"):
        toolset = plugins.find("toolsets", name)
        assert toolset.name == name
        assert [tool.name for tool in toolset.tools] == [t for t, owner in TOOL_TO_TOOLSET_MAP.items() if owner == name]
        for tool in toolset.tools:
            assert tool.toolset == name
            assert tool.schema.parameters["additionalProperties"] is False
            assert 20 < len(tool.schema.description) < 400
    assert set(TOOL_TO_TOOLSET_MAP.values()) <= {*BUILTIN_TOOLSETS, "web", "vision", "image_gen", "browser"}


async def test_closers_run_once_last_first_and_all() -> None:
    closed: list[int] = []

    def closer(number: int) -> Callable[[], Awaitable[None]]:
        async def close() -> None:
            closed.append(number)
            if number == 1:
                raise OSError("already gone")

        return close

    async with bench(toolsets=()) as made:
        made.context.closers.extend(closer(number) for number in range(3))
        with pytest.raises(OSError, match="already gone"):
            await made.toolbox.close()
        await made.toolbox.close()
    assert closed == [2, 1, 0]


async def test_the_toolbox_itself_costs_little(tools: Bench) -> None:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        return {"output": "hi\n", "exit_code": 0, "error": None}

    toolbox = Toolbox([make_tool("quick", run)], tools.context)
    calls = [ToolCall(id="c", name="quick", arguments='{"command": "echo hi"}')]
    best = min([await _seconds(toolbox, calls, 200) for _ in range(5)])
    assert best / 200 < 0.00015


async def _seconds(toolbox: Toolbox, calls: list[ToolCall], times: int) -> float:
    begun = time.process_time()
    for _ in range(times):
        await toolbox.call_all(calls)
    return time.process_time() - begun


@pytest.mark.parametrize("provider", [HostSandboxes, BubblewrapSandboxes])
async def test_the_builtin_tools_work_together_in_every_local_sandbox(provider: type[SandboxProvider]) -> None:
    async with bench(provider=provider) as made:
        results = await made.all(
            ("terminal", {"command": "mkdir -p work && cd work && export WHO=me"}),
            ("write_file", {"path": "a/b.txt", "content": "one\ntwo\n"}),
            ("patch", {"path": "a/b.txt", "old_string": "two", "new_string": "2"}),
            ("read_file", {"path": "a/b.txt"}),
            ("search_files", {"pattern": "^2$"}),
            ("terminal", {"command": "cat a/b.txt; basename $PWD; echo $WHO; sleep 100", "background": True}),
            ("process", {"action": "list"}),
        )
        assert [result.error for result in results] == [""] * 7
        texts = [orjson.loads(result.text) for result in results]
        name = texts[5]["session_id"]
        assert texts[3]["content"] == "     1|one\n     2|2"
        assert texts[4]["matches"] == [{"path": "a/b.txt", "line": 2, "content": "2"}]
        assert [each["session_id"] for each in texts[6]["processes"]] == [name]
        for _ in range(200):
            shown = await made.run("process", action="poll", session_id=name)
            if shown["output"].endswith("me\n"):
                break
            await asyncio.sleep(0.05)
        assert shown["output"] == "one\n2\nwork\nme\n"


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_exits_ends_nothing_else(calls: int) -> None:
    async def leaves(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        raise SystemExit(3)

    tool = Tool(
        schema=ToolSchema(name="leaves", description="d", parameters={"type": "object"}), toolset="t", run=leaves
    )
    box = HostSandboxes(options={}).make(SandboxSpec(session_id="s", run_id="r"))
    toolbox = Toolbox([tool], ToolContext(sandbox=box))
    results = await toolbox.call_all([ToolCall(id=str(n), name="leaves") for n in range(calls)])
    assert [(r.ok, "SystemExit" in r.text) for r in results] == [(False, True)] * calls
