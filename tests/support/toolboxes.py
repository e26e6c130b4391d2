"""A session's tools in a real sandbox, for tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from gristmill import plugins
from gristmill.sandbox.base import SandboxProvider, SandboxSpec
from gristmill.sandbox.host import HostSandboxes
from gristmill.tools.base import Tool, ToolContext
from gristmill.tools.toolbox import Toolbox
from gristmill.types import ToolCall, ToolResult


class Bench:
    """A toolbox with short words for calling it."""

    def __init__(self, context: ToolContext, tools: Iterable[Tool]) -> None:
        self.context = context
        self.sandbox = context.sandbox
        self.toolbox = Toolbox(tools, context)
        self._ids = itertools.count(1)

    def call(self, name: str, arguments: Any) -> ToolCall:
        """A call with a fresh id; a text is taken as the raw arguments."""
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return ToolCall(id=f"c{next(self._ids)}", name=name, arguments=raw)

    async def all(self, *calls: tuple[str, Any]) -> list[ToolResult]:
        """The results of one turn."""
        return await self.toolbox.call_all([self.call(name, arguments) for name, arguments in calls])

    async def result(self, name: str, arguments: Any) -> ToolResult:
        """The result of one call."""
        (result,) = await self.all((name, arguments))
        return result

    async def run(self, name: str, **arguments: Any) -> dict[str, Any]:
        """What the model reads of one call, as JSON."""
        shown = orjson.loads((await self.result(name, arguments)).text)
        assert isinstance(shown, dict)
        return shown

    async def shell(self, command: str) -> str:
        """The output of a command that succeeds."""
        shown = await self.run("terminal", command=command)
        assert shown["exit_code"] == 0, shown
        return str(shown["output"])


@asynccontextmanager
async def bench(
    *extra: Tool, provider: type[SandboxProvider] = HostSandboxes, toolsets: Iterable[str] = ("file", "terminal")
) -> AsyncIterator[Bench]:
    """Built-in toolsets and extra tools in a started sandbox, which is gone afterwards."""
    sandboxes = provider()
    sandbox = sandboxes.make(SandboxSpec(session_id="session", run_id="run"))
    tools = [tool for name in toolsets for tool in plugins.find("toolsets", name).tools]
    made = Bench(ToolContext(sandbox=sandbox, session_id="session"), [*tools, *extra])
    try:
        await sandbox.start()
        yield made
        await made.toolbox.close()
    finally:
        await sandbox.stop()
        sandboxes.close()
