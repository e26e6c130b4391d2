"""Sessions that call the browser's tools, and the worker that they share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.sandbox.base import Sandbox, SandboxSpec
from gristmill.sandbox.bubblewrap import BubblewrapSandboxes
from gristmill.sandbox.host import HostSandboxes
from gristmill.tools.base import ToolContext
from gristmill.tools.browser import BROWSER
from gristmill.tools.browsing.chromium import confinements

REASON = BROWSER.missing({})
MARKS = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(REASON), reason=REASON or "a browser is here"),
]
BWRAP = any(way.bubblewrap for way in confinements())
WAYS = [
    pytest.param(False, id="without-bubblewrap"),
    pytest.param(True, id="in-bubblewrap", marks=pytest.mark.skipif(not BWRAP, reason="bubblewrap is missing")),
]
TOOLS = {tool.name.removeprefix("browser_"): tool for tool in BROWSER.tools}


class Session:
    """One session that calls the browser's tools."""

    def __init__(self, context: ToolContext) -> None:
        self.context = context

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of one call, as a model gets it."""
        result = await TOOLS[tool].run(self.context, arguments)
        assert isinstance(result, dict)
        json.dumps(result, allow_nan=False)  # every result can be written
        return result

    async def ok(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = await self.call(tool, **arguments)
        assert result["success"] is True, result
        return result

    async def fails(self, tool: str, **arguments: Any) -> str:
        result = await self.call(tool, **arguments)
        assert result["success"] is False, result
        return str(result["error"])

    async def value(self, expression: str) -> Any:
        return (await self.ok("console", expression=expression))["result"]

    @staticmethod
    def ref(result: dict[str, Any], text: str) -> str:
        """The ref of the line that holds a text."""
        line = next(line for line in result["snapshot"].splitlines() if text in line and " @e" in line)
        return "@" + line.split(" @")[1].split()[0].rstrip(":")

    async def end(self) -> None:
        for closer in reversed(self.context.closers):
            await closer()
        self.context.closers.clear()


class Worker:
    """What a worker has for all its sessions, and the sessions."""

    def __init__(self) -> None:
        self.shared: dict[str, Any] = {}
        self.shared_closers: list[Any] = []
        self._sessions: list[Session] = []
        self._open = HostSandboxes()
        self._isolated = BubblewrapSandboxes()

    async def session(self, *, isolated: bool = False, **settings: Any) -> Session:
        """A session with a started sandbox: of its own network, or (the default) on this machine."""
        sandbox: Sandbox = (self._isolated if isolated else self._open).make(SandboxSpec(session_id="s", run_id="r"))
        await sandbox.start()
        session = Session(
            ToolContext(sandbox=sandbox, shared=self.shared, shared_closers=self.shared_closers, **settings)
        )
        self._sessions.append(session)
        return session

    async def end_sessions(self) -> None:
        while self._sessions:
            session = self._sessions.pop()
            await session.end()
            await session.context.sandbox.stop()

    async def end(self) -> None:
        await self.end_sessions()
        for closer in reversed(self.shared_closers):
            await closer()
        self._open.close()
        self._isolated.close()
