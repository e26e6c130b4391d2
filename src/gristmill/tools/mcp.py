"""MCP servers as toolsets: each server of `--mcp_config` is one, by its name.

Before the run `discover` asks every server for its tools; `mcp_toolsets` makes toolsets of the answer, the same in each
process, so that names and schemas are fixed for the run. A worker connects at the first call, once for all its sessions
(`per_session`: once for each). A connection that breaks costs the calls on it an error result, and the next call a new
start; calls are never repeated, since nobody knows what a server did before it went silent.

Servers are the user's own choice: their programs run on this machine, outside of any sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from gristmill.tools.base import Access, Tool, ToolContext, ToolOutput, Toolset
from gristmill.tools.mcp_config import McpConfig, McpServer
from gristmill.types import ToolSchema

if TYPE_CHECKING:
    from mcp.types import CallToolResult

    from gristmill.tools.mcp_client import Connection

NAME_LENGTH = 64  # characters of a tool's name that model endpoints take
ERROR_LENGTH = 2_000  # characters
FOLDER = "mcp"  # of the workspace, for pictures and the like

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class Discovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers offer: `tools` by server, under the server's own names; `problems` say why one has none."""

    tools: dict[str, tuple[ToolSchema, ...]] = {}
    problems: dict[str, str] = {}


async def discover(config: McpConfig) -> Discovery:
    """Start every server, ask for its tools and end it again; a server that fails is a problem, not an error.

    Raises `ModuleNotFoundError` where the library `mcp` is missing.
    """
    from gristmill.tools.mcp_client import Connection, McpFailed

    async def ask(server: McpServer) -> tuple[tuple[ToolSchema, ...], str]:
        connection = Connection(server)
        try:
            offered = await connection.list_tools()
        except McpFailed as error:
            return (), _without_secrets(server, str(error))
        finally:
            await connection.close()
        unknown = [name for name in server.tools if name not in offered]
        if unknown:
            return (), f"it has no tool named {', '.join(unknown)}; it has {', '.join(offered) or 'none'}"
        kept = [_clean(server, schema) for name, schema in offered.items() if not server.tools or name in server.tools]
        return tuple(kept), "" if kept else "it offers no tools"

    answers = await asyncio.gather(*(ask(server) for server in config.servers))
    return Discovery(
        tools={server.name: tools for server, (tools, _) in zip(config.servers, answers, strict=True)},
        problems={server.name: why for server, (_, why) in zip(config.servers, answers, strict=True) if why},
    )


def mcp_toolsets(config: McpConfig, discovery: Discovery, taken: Collection[str]) -> dict[str, Toolset]:
    """A toolset for each server, by its name. Pure: the same in every process.

    A tool keeps its server's name for it, unless another tool has it too; then, and where endpoints would not take it,
    it is named after its server as well.

    Args:
        taken: the names of all other tools that the run knows.
    """
    counts = Counter(_NOT_IN_NAMES.sub("_", s.name) for tools in discovery.tools.values() for s in tools)
    used = set(taken)
    found: dict[str, Toolset] = {}
    for server in config.servers:
        tools = []
        for schema in discovery.tools.get(server.name, ()):
            plain = _NOT_IN_NAMES.sub("_", schema.name)
            alone = counts[plain] == 1 and plain not in used and len(plain) <= NAME_LENGTH
            name = plain if alone else _free(f"{server.name}_{plain}", used)
            used.add(name)
            tools.append(_tool(server, schema, name))
        problem = discovery.problems.get(server.name, "")
        found[server.name] = Toolset(
            name=server.name,
            tools=tuple(tools),
            missing=_always(problem and f"its MCP server cannot be used: {problem}"),
        )
    return found


def _free(name: str, used: set[str]) -> str:
    number = 1
    while True:
        end = f"_{number}" if number > 1 else ""
        candidate = name[: NAME_LENGTH - len(end)] + end
        if candidate not in used:
            return candidate
        number += 1


def _always(problem: str) -> Callable[[Any], str]:
    return lambda settings: problem


def _tool(server: McpServer, schema: ToolSchema, name: str) -> Tool:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        from gristmill.tools.mcp_client import McpFailed

        try:
            result = await _connection(server, context).call(schema.name, arguments)
        except McpFailed as error:
            return {"error": _without_secrets(server, str(error))[:ERROR_LENGTH]}
        return await _output(server, context, result)

    shown = ToolSchema(name=name, description=schema.description, parameters=schema.parameters)
    # What a server's tool touches is its secret, so its calls keep their order.
    access = Access(("mcp", server.name), writes=True)
    return Tool(schema=shown, toolset=server.name, run=run, access=lambda arguments: access)


def _connection(server: McpServer, context: ToolContext) -> Connection:
    from gristmill.tools.mcp_client import Connection

    key = f"mcp:{server.name}"
    place, closers = (
        (context.state, context.closers) if server.per_session else (context.shared, context.shared_closers)
    )
    connection = place.get(key)
    if connection is None:
        connection = place[key] = Connection(server)
        closers.append(connection.close)
    assert isinstance(connection, Connection)
    return connection


async def _output(server: McpServer, context: ToolContext, result: CallToolResult) -> ToolOutput:
    """A server's answer in our shape: `{"result": text}` or `{"error": text}`, with paths of what is not text."""
    texts: list[str] = []
    files: list[dict[str, str]] = []
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type in ("image", "audio"):
            files.append(await _saved(context, server, block.data, block.mime_type or ""))
        elif block.type == "resource_link":
            texts.append(f"{block.name}: {block.uri}")
        elif block.type == "resource":
            inner: Any = block.resource
            if hasattr(inner, "text"):
                texts.append(inner.text)
            else:
                files.append(await _saved(context, server, inner.blob, inner.mime_type or ""))
    text = "\n".join(texts)
    structured = result.structured_content
    if result.is_error:
        return {"error": _without_secrets(server, text or "The tool failed without a word.")[:ERROR_LENGTH]}
    output: dict[str, Any] = {"result": _without_secrets(server, text)}
    if structured is not None and not _says(text, structured):
        output["structured_content"] = orjson.loads(_without_secrets(server, orjson.dumps(structured).decode()))
    if files:
        output["files"] = files
    return output


def _says(text: str, structured: Any) -> bool:
    """True where the text is the structured content, which servers are asked to send twice."""
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        said = text
    return said in (structured, structured.get("result") if isinstance(structured, dict) else structured)


async def _saved(context: ToolContext, server: McpServer, data: str, kind: str) -> dict[str, str]:
    """Put what is not text into the sandbox and say where."""
    ending = re.sub(r"[^a-z0-9]", "", kind.partition(";")[0].rpartition("/")[2].lower())[:8] or "bin"
    count = context.state[f"mcp:{FOLDER}"] = context.state.get(f"mcp:{FOLDER}", 0) + 1
    path = f"{context.sandbox.workspace}/{FOLDER}/{server.name}-{count}.{ending}"
    try:
        await context.sandbox.write(path, base64.b64decode(data))
    except (ValueError, OSError) as error:
        return {"mime_type": kind, "error": str(error)}
    return {"mime_type": kind, "path": path}


def _clean(server: McpServer, schema: ToolSchema) -> ToolSchema:
    """What a server says of a tool, without its keys: the rows have it."""
    return msgspec.json.decode(_without_secrets(server, msgspec.json.encode(schema).decode()), type=ToolSchema)


def _without_secrets(server: McpServer, text: str) -> str:
    for secret in server.secrets:
        text = text.replace(secret, "***")
    return text
