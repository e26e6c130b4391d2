"""A real Chromium, real pages on loopback, and one session's tools."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from support.browsing import Session, Worker
from support.site import Site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_worker() -> AsyncIterator[Worker]:
    """A worker whose browser serves all tests of a module."""
    worker = Worker()
    yield worker
    await worker.end()


@pytest_asyncio.fixture(loop_scope="module")
async def worker(one_worker: Worker) -> AsyncIterator[Worker]:
    """The module's worker; its sessions end with the test."""
    yield one_worker
    await one_worker.end_sessions()


@pytest_asyncio.fixture(loop_scope="module")
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.start()
    yield site
    await site.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def session(worker: Worker) -> Session:
    """A session that may read pages of this machine."""
    return await worker.session(allow_private_urls=True)


@pytest_asyncio.fixture(loop_scope="module")
async def boxed(worker: Worker) -> Session:
    """A session in a sandbox with a network of its own, under the usual rules."""
    return await worker.session(isolated=True)
