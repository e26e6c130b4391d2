"""Sandboxes that are kept ready: who gets them, what they cost, and that none stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gristmill.config import SandboxConfig
from gristmill.errors import SandboxError
from gristmill.sandbox.base import Capabilities, Sandbox, SandboxSpec
from gristmill.sandbox.host import HostSandbox, HostSandboxes
from gristmill.sandbox.pool import PooledSandbox, PooledSandboxes, pooled
from gristmill.testing.boxes import soon, spec, started, text
from gristmill.testing.sandbox_suite import SandboxSuite

START = 0.5  # seconds that a slow sandbox takes to start
LIKE = SandboxSpec(session_id="pool", run_id="suite")


class SlowSandbox(HostSandbox):
    """A host sandbox that takes its time, and fails where it is told to."""

    failing = False

    async def start(self) -> None:
        await asyncio.sleep(START)
        if SlowSandbox.failing:
            raise SandboxError("no luck today")
        await super().start()


class SlowSandboxes(HostSandboxes):
    capabilities = Capabilities(isolated=False)

    def _make(self, spec: SandboxSpec) -> HostSandbox:
        return SlowSandbox(spec, self._place, self._limits)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[PooledSandboxes]:
    pool = PooledSandboxes(SlowSandboxes(tmp_path), 2, LIKE)
    yield pool
    await pool.drain()
    assert list(tmp_path.glob("gristmill-*/s-*")) == []
    pool.close()
    assert list(tmp_path.iterdir()) == []


class TestPooled(SandboxSuite):
    @pytest.fixture
    async def provider(self, tmp_path: Path) -> AsyncIterator[PooledSandboxes]:
        provider = PooledSandboxes(HostSandboxes(tmp_path), 2, LIKE)
        yield provider
        await provider.drain()
        assert list(tmp_path.glob("gristmill-*/s-*")) == []
        provider.close()


async def seconds_to_start(box: Sandbox) -> float:
    began = time.monotonic()
    await box.start()
    return time.monotonic() - began


async def test_sessions_start_at_once_and_are_alone(pool: PooledSandboxes) -> None:
    first = pool.make(spec())
    assert isinstance(first, PooledSandbox)
    await asyncio.sleep(START + 0.3)
    assert await seconds_to_start(first) < START / 2
    assert first.workspace != Sandbox.workspace and await text(first, "pwd") == first.workspace
    await first.exec("touch mine; export V=1", timeout=10)
    second = pool.make(spec())
    assert await seconds_to_start(second) < START / 2
    assert await text(second, "ls; echo $V") == ""
    assert first.workspace != second.workspace
    third = pool.make(spec())  # begun when the first was taken
    assert await seconds_to_start(third) < START
    for box in (first, second, third):
        await box.stop()
        await box.stop()


async def test_a_row_that_asks_for_something_of_its_own_gets_it(pool: PooledSandboxes) -> None:
    box = pool.make(spec(cwd="sub"))
    assert isinstance(box, SlowSandbox)
    async with started(pool, cwd="sub") as other:
        assert (await text(other, "pwd")).endswith("/workspace/sub")
    await box.stop()


async def test_one_that_died_while_it_waited_is_replaced(pool: PooledSandboxes) -> None:
    box = pool.make(spec())
    ready = pool._ready[0]
    await asyncio.wait([ready._starting])
    await ready.sandbox.stop()
    assert await seconds_to_start(box) >= START
    assert await text(box, "echo works") == "works"
    await box.stop()


async def test_what_fails_to_start_for_nobody_is_told_to_who_asks(
    pool: PooledSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowSandbox, "failing", True)
    box = pool.make(spec())
    with pytest.raises(SandboxError, match="no luck today"):
        await box.start()
    with pytest.raises(SandboxError, match="starts once"):
        await box.start()
    with pytest.raises(SandboxError, match="was not started"):
        await box.exec("true", timeout=5)
    await box.stop()


async def test_draining_while_they_start_leaves_nothing(pool: PooledSandboxes, tmp_path: Path) -> None:
    box = pool.make(spec())
    waiting = asyncio.create_task(box.start())
    await asyncio.sleep(START / 5)
    waiting.cancel()
    await asyncio.wait([waiting])
    await box.stop()
    await pool.drain()
    assert pool.take() is None  # and no more are begun
    assert await soon(lambda: not list(tmp_path.glob("gristmill-*/s-*")))


def test_a_pool_only_where_it_gains_something(tmp_path: Path) -> None:
    class Images(SlowSandboxes):
        capabilities = Capabilities(isolated=False, images=True)

    host, slow, images = HostSandboxes(tmp_path), SlowSandboxes(tmp_path), Images(tmp_path)
    asked = SandboxConfig(pool=3, image="debian:12", cwd="x")
    assert pooled(host, asked, "r") is host
    assert pooled(slow, SandboxConfig(), "r") is slow
    assert pooled(images, SandboxConfig(pool=3), "r") is images  # each row has an image of its own
    for provider, image in ((slow, ""), (images, "debian:12")):
        found = pooled(provider, asked, "r")
        assert isinstance(found, PooledSandboxes)
        assert found._like == SandboxSpec(session_id="pool", run_id="r", image=image, cwd="x")
    for made in (host, slow, images):
        made.close()
