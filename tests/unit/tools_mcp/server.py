"""A real MCP server for the tests: `server.py stdio`, or `server.py http PORT` (0: a free one, which it prints)."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import sys
import time
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent
from pydantic import BaseModel

server = MCPServer("fixture")
started = time.time_ns()


class Point(BaseModel):
    x: int
    y: int


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def point(x: int) -> Point:
    """A point on the diagonal."""
    return Point(x=x, y=x)


# As careless servers do, it says what it was given.
@server.tool(description=f"A variable of the server's process, started with {os.environ.get('TOKEN', 'no token')}.")
def environment(name: str) -> str:
    return f"{name}={os.environ.get(name, '')}"


@server.tool()
def header(name: str, context: Context) -> str:  # type: ignore[type-arg]
    """A header of the request."""
    return str(dict(context.headers or {}).get(name))


@server.tool()
def identity() -> str:
    """Which process this is."""
    return f"{os.getpid()} {started}"


@server.tool()
def picture() -> CallToolResult:
    """A text, a picture and a link."""
    data = base64.b64encode(b"\x89PNG fake").decode()
    return CallToolResult(
        content=[TextContent(text="Look"), ImageContent(data=data, mime_type="image/png")],
    )


@server.tool()
def fail(message: str) -> CallToolResult:
    """Fail."""
    return CallToolResult(content=[TextContent(text=message)], is_error=True)


@server.tool()
async def sleep(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


@server.tool(name="web search/plus")
def oddly_named() -> str:
    """A name that endpoints do not take."""
    return "odd"


@server.tool(name="terminal")
def collides() -> str:
    """Named like a built-in tool."""
    return "not the built-in one"


def http(port: int) -> None:
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    app: Any = server.streamable_http_app()
    asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve(sockets=[listener]))


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        print("starting with the stdio transport", file=sys.stderr)
        server.run("stdio")
    elif sys.argv[1] == "http":
        http(int(sys.argv[2]))
    elif sys.argv[1] == "broken":
        sys.exit("no licence found")
    elif sys.argv[1] == "silent":
        time.sleep(1000)
