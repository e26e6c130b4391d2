"""Real servers on loopback and session contexts for the web, vision and image tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gristmill.tools.base import AskModel, ToolContext

from .parts import FolderSandbox

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[TestServer]]]:
    """Start servers on loopback: `await serve({"/path": handler})`; `*` in a path is any rest of it."""
    servers: list[TestServer] = []

    async def start(routes: dict[str, Handler]) -> TestServer:
        app = web.Application(client_max_size=50_000_000)
        for path, handler in routes.items():
            app.router.add_route("*", path.replace("*", "{rest:.*}"), handler)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[Callable[..., ToolContext]]:
    """Make contexts of sessions; what a worker would close at its end is closed with the test."""
    made: list[ToolContext] = []

    def make(*, private: bool = False, vision: AskModel | None = None, **settings: str) -> ToolContext:
        folder = tmp_path / "workspace"
        folder.mkdir(exist_ok=True)
        settings.setdefault("XDG_CACHE_HOME", str(tmp_path / "cache"))
        made.append(
            ToolContext(sandbox=FolderSandbox(folder), allow_private_urls=private, vision=vision, settings=settings)
        )
        return made[-1]

    yield make
    for one in made:
        for closer in reversed(one.shared_closers):
            await closer()
