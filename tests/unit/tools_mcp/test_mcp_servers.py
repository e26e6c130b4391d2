"""Real MCP servers, over stdio and over HTTP: discovered, called, broken, restarted and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from gristmill.sandbox.base import SandboxSpec
from gristmill.sandbox.host import HostSandboxes
from gristmill.tools import mcp_client
from gristmill.tools.base import ToolContext, Toolset
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP
from gristmill.tools.mcp import Discovery, discover, mcp_toolsets
from gristmill.tools.mcp_config import McpConfig, McpServer
from gristmill.types import ToolSchema

SERVER = str(Path(__file__).with_name("server.py"))


def stdio(name: str = "box", how: str = "stdio", **settings: Any) -> McpServer:
    return McpServer(name=name, command=sys.executable, args=(SERVER, how), **settings)


class Session:
    def __init__(self, toolsets: dict[str, Toolset], context: ToolContext) -> None:
        self.context = context
        self.tools = {tool.name: tool for toolset in toolsets.values() for tool in toolset.tools}

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        output = await self.tools[tool].run(self.context, arguments)
        assert isinstance(output, dict)
        return output

    async def end(self) -> None:
        for closer in reversed(self.context.closers):
            await closer()


class Worker:
    _offered: ClassVar[list[ToolSchema]] = []

    def __init__(self) -> None:
        self.shared: dict[str, Any] = {}
        self.shared_closers: list[Any] = []
        self._sandboxes = HostSandboxes()
        self._sessions: list[Session] = []

    async def session(self, *servers: McpServer) -> Session:
        """A session with the tools of the test server, however it is reached; found out once a process."""
        offered = self._offered or (await discover(McpConfig(servers=(stdio(),)))).tools["box"]
        self._offered.extend(offered if not self._offered else ())
        tools = {s.name: tuple(t for t in offered if not s.tools or t.name in s.tools) for s in servers}
        toolsets = mcp_toolsets(McpConfig(servers=servers), Discovery(tools=tools), TOOL_TO_TOOLSET_MAP)
        sandbox = self._sandboxes.make(SandboxSpec(session_id="s", run_id="r"))
        await sandbox.start()
        context = ToolContext(sandbox=sandbox, shared=self.shared, shared_closers=self.shared_closers)
        session = Session(toolsets, context)
        self._sessions.append(session)
        return session

    async def end(self) -> None:
        for session in self._sessions:
            await session.end()
            await session.context.sandbox.stop()
        for closer in self.shared_closers:
            await closer()
        self._sandboxes.close()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    yield worker
    await worker.end()
    assert servers_running() == []


def servers_running() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if SERVER in process.cmdline() and "http" not in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


class HttpServer:
    """The same server over streamable HTTP, as a process of its own."""

    port = 0

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, SERVER, "http", str(self.port)), stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.port = int(await self._process.stdout.readline())

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@pytest.fixture
async def http() -> AsyncIterator[HttpServer]:
    server = HttpServer()
    await server.start()
    yield server
    await server.kill()


async def test_tools_are_discovered_with_their_schemas_and_nothing_is_left() -> None:
    found = await discover(McpConfig(servers=(stdio(), stdio("few", tools=("add", "fail")))))
    assert found.problems == {}
    add = next(schema for schema in found.tools["box"] if schema.name == "add")
    assert add.description == "Add two numbers."
    assert add.parameters["properties"]["a"]["type"] == "integer" and add.parameters["required"] == ["a"]
    assert [schema.name for schema in found.tools["few"]] == ["add", "fail"]
    assert servers_running() == []


async def test_every_problem_of_a_server_is_a_sentence() -> None:
    servers = (
        McpServer(name="absent", command="no-such-program"),
        stdio("broken", "broken"),
        stdio("silent", "silent", start_timeout=1.0),
        stdio("poor", tools=("add", "fly")),
        McpServer(name="closed", url="http://127.0.0.1:9/mcp"),
        stdio("good"),
    )
    found = await discover(McpConfig(servers=servers))
    assert "'no-such-program' is not installed" in found.problems["absent"]
    assert "no licence found" in found.problems["broken"]
    assert "did not start within 1 seconds" in found.problems["silent"]
    assert "no tool named fly; it has add, " in found.problems["poor"]
    assert found.problems["closed"]
    assert "good" not in found.problems and found.tools["good"]
    toolsets = mcp_toolsets(McpConfig(servers=servers), found, ())
    assert toolsets["broken"].missing({}).endswith(found.problems["broken"]) and toolsets["broken"].tools == ()
    assert toolsets["good"].missing({}) == ""
    assert servers_running() == []


async def test_names_that_collide_or_that_endpoints_do_not_take_get_the_server_s() -> None:
    config = McpConfig(servers=(stdio("one"), stdio("two", tools=("terminal", "add"))))
    found = await discover(config)
    toolsets = mcp_toolsets(config, found, TOOL_TO_TOOLSET_MAP)
    assert {tool.name for tool in toolsets["two"].tools} == {"two_terminal", "two_add"}
    names = {tool.name for tool in toolsets["one"].tools}
    assert {"one_terminal", "one_add", "web_search_plus", "fail"} <= names
    assert all(tool.toolset == "one" for tool in toolsets["one"].tools)
    again = mcp_toolsets(config, found, TOOL_TO_TOOLSET_MAP)
    assert [tool.schema for tool in again["one"].tools] == [tool.schema for tool in toolsets["one"].tools]


def test_long_and_equal_names_stay_apart() -> None:
    schemas = tuple(ToolSchema(name="n" * 70 + end, description="", parameters={}) for end in "ab")
    servers = tuple(McpServer(name=name, command="x") for name in ("s", "t"))
    found = Discovery(tools={"s": schemas, "t": schemas})
    toolsets = mcp_toolsets(McpConfig(servers=servers), found, ())
    names = [tool.name for toolset in toolsets.values() for tool in toolset.tools]
    assert len(set(names)) == 4 and all(len(name) <= 64 for name in names)


async def test_calls_and_their_results(worker: Worker) -> None:
    session = await worker.session(stdio())
    assert await session.call("add", a=2, b=3) == {"result": "5"}
    assert await session.call("web_search_plus") == {"result": "odd"}
    assert await session.call("box_terminal") == {"result": "not the built-in one"}
    point = await session.call("point", x=2)
    assert '"x": 2' in point["result"] and "structured_content" not in point  # said once
    assert "went wrong" in (await session.call("fail", message="went wrong"))["error"]
    picture = await session.call("picture")
    assert picture["result"] == "Look" and picture["files"][0]["mime_type"] == "image/png"
    assert await session.context.sandbox.read(picture["files"][0]["path"], 100) == b"\x89PNG fake"
    assert "error" in await session.call("add", a="x")
    results = await asyncio.gather(*(session.call("add", a=n) for n in range(20)))
    assert [result["result"] for result in results] == [str(n + 1) for n in range(20)]


async def test_one_program_per_worker_or_one_per_session(worker: Worker) -> None:
    shared, own = stdio("shared", tools=("identity",)), stdio("own", tools=("identity",), per_session=True)
    first, second = await worker.session(shared, own), await worker.session(shared, own)
    ids = [[(await each.call(f"{name}_identity"))["result"] for each in (first, second)] for name in ("shared", "own")]
    assert len(set(ids[0])) == 1 and len(set(ids[1])) == 2
    assert len(servers_running()) == 3
    await first.end()
    assert len(servers_running()) == 2
    assert (await second.call("own_identity"))["result"] == ids[1][1]


async def test_a_server_that_dies_costs_the_call_and_is_started_again(worker: Worker) -> None:
    session = await worker.session(stdio())
    before = (await session.call("identity"))["result"]
    waiting = asyncio.create_task(session.call("sleep", seconds=60))
    await asyncio.sleep(0.2)
    error = (await session.call("die"))["error"]
    assert "connection to the server box broke" in error and "connects again" in error
    assert "broke" in (await waiting)["error"]
    after = (await session.call("identity"))["result"]
    assert after != before
    for process in servers_running():
        process.kill()
    await asyncio.sleep(0.1)
    assert "broke" in (await session.call("add", a=1))["error"]
    assert await session.call("add", a=1) == {"result": "2"}
    assert len(servers_running()) == 1


async def test_a_slow_call_ends_in_time_and_the_connection_lives(worker: Worker) -> None:
    session = await worker.session(stdio(timeout=0.5))
    before = (await session.call("identity"))["result"]
    assert "did not answer within 0.5 seconds" in (await session.call("sleep", seconds=30))["error"]
    assert (await session.call("identity"))["result"] == before
    cancelled = asyncio.create_task(session.call("sleep", seconds=30))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await session.call("identity"))["result"] == before


async def test_a_server_that_no_longer_starts_is_not_tried_at_every_call(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "FIRST_PAUSE", 20.0)
    count = tmp_path / "starts"
    script = tmp_path / "server"
    script.write_text(
        f"#!/bin/sh\necho x >>{count}\n[ -e {tmp_path}/off ] && exit 5\nexec {sys.executable} {SERVER} stdio\n"
    )
    script.chmod(0o755)
    session = await worker.session(McpServer(name="box", command=str(script)))
    (tmp_path / "off").touch()
    results = [await session.call("add", a=1) for _ in range(5)]
    assert all("does not start" in result["error"] for result in results)
    assert len(count.read_text().split()) == 1
    (tmp_path / "off").unlink()
    assert "does not start" in (await session.call("add", a=1))["error"]
    worker.shared["mcp:box"]._not_before = 0.0  # the pause is over
    assert await session.call("add", a=1) == {"result": "2"}


async def test_environment_and_secrets(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-runner")
    server = stdio(env={"MODE": "fast-mode", "API_TOKEN": "tok-123456"}, filled=("filled-in",))
    session = await worker.session(server)
    assert (await session.call("environment", name="OPENAI_API_KEY"))["result"] == "OPENAI_API_KEY="
    assert (await session.call("environment", name="MODE"))["result"] == "MODE=fast-mode"
    assert (await session.call("environment", name="API_TOKEN"))["result"] == "API_TOKEN=***"
    failed = await session.call("fail", message="bad key tok-123456 and filled-in")
    assert "tok-123456" not in failed["error"] and "filled-in" not in failed["error"] and "***" in failed["error"]


async def test_an_http_server_is_called_with_its_headers(worker: Worker, http: HttpServer) -> None:
    server = McpServer(
        name="web",
        url=f"http://127.0.0.1:{http.port}/mcp",
        headers={"X-Mode": "quick", "Authorization": "Bearer k-12345"},
    )
    found = await discover(McpConfig(servers=(server,)))
    assert found.problems == {} and len(found.tools["web"]) > 5
    session = await worker.session(server)
    assert await session.call("add", a=4) == {"result": "5"}
    assert (await session.call("header", name="x-mode"))["result"] == "quick"
    assert (await session.call("header", name="authorization"))["result"] == "***"


async def test_an_http_server_that_goes_and_comes_back(worker: Worker, http: HttpServer) -> None:
    session = await worker.session(McpServer(name="web", url=f"http://127.0.0.1:{http.port}/mcp"))
    assert await session.call("add", a=4) == {"result": "5"}
    await http.kill()
    assert "error" in await session.call("add", a=4)
    await http.start()
    async with asyncio.timeout(20):
        while "error" in (result := await session.call("add", a=4)):
            await asyncio.sleep(0.2)
    assert result == {"result": "5"}


SCRIPT = """
import asyncio, sys
from gristmill.tools.mcp_client import Connection
from gristmill.tools.mcp_config import McpServer
async def main():
    connection = Connection(McpServer(name="box", command=sys.executable, args=(sys.argv[1], sys.argv[2])))
    call = asyncio.create_task(connection.call("identity", {}))
    if sys.argv[2] == "stdio":
        await call
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["stdio", "silent"])
async def test_a_killed_worker_leaves_no_server(how: str) -> None:
    """Also not one that never looks at the end of its input."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(SCRIPT), SERVER, how), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(worker.pid).children(recursive=True)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert children
    os.kill(worker.pid, signal.SIGKILL)
    await worker.wait()
    gone, left = psutil.wait_procs(children, timeout=10)
    for process in left:
        process.kill()
    assert left == [] and gone


async def test_closing_while_a_server_starts_leaves_nothing() -> None:
    connection = mcp_client.Connection(stdio("silent", "silent"))
    call = asyncio.create_task(connection.call("add", {}))
    await asyncio.sleep(0.3)
    assert len(servers_running()) == 1
    await connection.close()
    with pytest.raises(mcp_client.McpFailed, match="closed"):
        await call
    assert servers_running() == []
    await connection.close()
    with pytest.raises(mcp_client.McpFailed, match="closed"):
        await connection.call("add", {})
