"""One live connection to an MCP server: started when needed, started again after it broke, ended with its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS, METHOD_NOT_FOUND, REQUEST_TIMEOUT, CallToolResult
from pydantic import ValidationError

from gristmill.tools.leash import die_with_parent
from gristmill.tools.mcp_config import McpServer
from gristmill.types import ToolSchema

CLOSE_SECONDS = 10.0  # the SDK itself needs up to about six to end a program that ignores the end of its input
CHECK_SECONDS = 5.0
PAGES_LIMIT = 100  # of a list of tools
STDERR_LIMIT = 400  # characters kept of what a program says, to explain its end
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a start that follows failed ones


class McpFailed(Exception):
    """The server could not be started, reached, or did not answer; a sentence."""


@dataclass(eq=False)
class _Link:
    """One connection from its start to its end. The SDK wants both done by one task: the keeper."""

    ready: asyncio.Future[Client]
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None


class Connection:
    """What a worker or a session has of one server. Calls may overlap; `close` may come at any time."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._link: _Link | None = None
        self._pause = 0.0
        self._not_before = 0.0
        self._why = ""
        self._closed = False

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool by the server's name for it. Raises `McpFailed`."""
        link, client = await self._connected()
        late = f"{tool} did not answer within {self._server.timeout:g} seconds."
        try:
            async with asyncio.timeout(self._server.timeout + CHECK_SECONDS):
                return await client.call_tool(tool, arguments, read_timeout_seconds=self._server.timeout)
        except TimeoutError:
            raise McpFailed(late) from None
        except ValidationError as error:
            raise McpFailed(f"{tool} gave an answer that is not MCP ({error.error_count()} faults).") from error
        except Exception as error:  # the edge to the SDK: besides its own error, whatever a transport raises
            code = error.code if isinstance(error, MCPError) else 0
            if code == REQUEST_TIMEOUT:
                raise McpFailed(late) from None
            if code in (INVALID_PARAMS, METHOD_NOT_FOUND) or await self._answers(link, client):
                raise McpFailed(f"{tool}: {_said(error)}") from error
            raise McpFailed(
                f"The connection to the server {self._server.name} broke ({_said(error)}). Whether the call had an "
                "effect is unknown. The next call connects again."
            ) from error

    async def list_tools(self) -> dict[str, ToolSchema]:
        """All tools, by name. Raises `McpFailed`."""
        _, client = await self._connected()
        found: dict[str, ToolSchema] = {}
        cursor: str | None = None
        try:
            async with asyncio.timeout(self._server.start_timeout):
                for _ in range(PAGES_LIMIT):
                    page = await client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        parameters = {"type": "object"} | tool.input_schema
                        found[tool.name] = ToolSchema(
                            name=tool.name, description=tool.description or "", parameters=parameters
                        )
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except TimeoutError:
            raise McpFailed(f"it did not list its tools within {self._server.start_timeout:g} seconds") from None
        except Exception as error:  # the edge to the SDK
            raise McpFailed(f"it cannot list its tools: {_said(error)}") from error
        return found

    async def close(self) -> None:
        """End the connection and the server's program; idempotent."""
        self._closed = True
        if self._link is not None:
            await self._end(self._link)

    async def _connected(self) -> tuple[_Link, Client]:
        """The connection, started where there is none. Raises `McpFailed`."""
        if self._closed:
            raise McpFailed("The connection is closed.")
        link = self._link
        if link is None or link.keeper is None or link.keeper.done():
            if time.monotonic() < self._not_before:
                raise McpFailed(self._why)
            link = self._link = _Link(ready=asyncio.get_running_loop().create_future())
            link.keeper = asyncio.create_task(self._keep(link))
        try:
            return link, await asyncio.shield(link.ready)
        except McpFailed as error:
            raise McpFailed(str(error)) from None  # each waiter gets an exception of its own

    async def _keep(self, link: _Link) -> None:
        """Open a client, hold it until it is to be left, close it."""
        heard = _Heard()
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.start_timeout):
                    client = await stack.enter_async_context(self._client_of(await self._transport(stack, heard)))
                link.ready.set_result(client)
                self._pause = 0.0
                await link.leave.wait()
        except Exception as error:  # noqa: BLE001 - the edge to the SDK, which raises groups of what its tasks raised
            if not link.ready.done():
                self._fail(link, error, heard.text())
        finally:
            heard.close()
            if not link.ready.done():
                link.ready.set_exception(McpFailed("The connection is closed."))
                link.ready.exception()  # whether or not someone waits

    def _fail(self, link: _Link, error: Exception, heard: str) -> None:
        """Tell those who wait why the server does not start, and let the next ones wait a while before a new try."""
        if isinstance(error, McpFailed):
            why = str(error)
        elif isinstance(error, TimeoutError):
            why = f"it did not start within {self._server.start_timeout:g} seconds"
        else:
            why = f"it does not start: {_said(error)}"
        self._why = f"{why}; it said: {heard}" if heard else why
        self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
        self._not_before = time.monotonic() + self._pause
        link.ready.set_exception(McpFailed(self._why))
        link.ready.exception()

    def _client_of(self, transport: Any) -> Client:
        return Client(transport, read_timeout_seconds=self._server.start_timeout)

    async def _transport(self, stack: contextlib.AsyncExitStack, heard: _Heard) -> Any:
        server = self._server
        if server.url:
            timeout = httpx2.Timeout(30.0, read=server.timeout + 60)
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=server.headers, timeout=timeout))
            return streamable_http_client(server.url, http_client=http)
        path = server.env.get("PATH")
        program = shutil.which(server.command, path=path)
        if program is None:
            raise McpFailed(f"its command {server.command!r} is not installed")
        command, *args = die_with_parent([program, *server.args])
        parameters = StdioServerParameters(command=command, args=args, env=server.env, cwd=server.cwd or None)
        return stdio_client(parameters, errlog=heard.file)

    async def _answers(self, link: _Link, client: Client) -> bool:
        """Whether the connection still works; one that does not is ended."""
        with contextlib.suppress(Exception):  # the edge to the SDK: any failure means no
            async with asyncio.timeout(CHECK_SECONDS):
                await client.list_tools(cache_mode="refresh")
                return True
        await self._end(link)
        return False

    async def _end(self, link: _Link) -> None:
        if self._link is link:
            self._link = None
        keeper = link.keeper
        if keeper is None:
            return
        link.leave.set()
        if not link.ready.done():
            keeper.cancel()  # still starting
        await asyncio.wait((keeper,), timeout=CLOSE_SECONDS)
        if not keeper.done():
            keeper.cancel()
            await asyncio.wait((keeper,), timeout=CLOSE_SECONDS)


class _Heard:
    """The end of what a program writes to stderr, which nobody else would read."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.file = os.fdopen(writer, "w")
        self._tail = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def text(self) -> str:
        """The last words, in one line."""
        self._read()
        return " ".join(self._tail.decode("utf-8", "replace").split())[-STDERR_LIMIT:]

    def close(self) -> None:
        self.text()
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        self.file.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self._reader, 65_536):
                self._tail = (self._tail + data)[-2 * STDERR_LIMIT :]
                if len(data) < 65_536:
                    break


def _said(error: BaseException) -> str:
    """The innermost words of an error, of the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:500] or type(error).__name__
