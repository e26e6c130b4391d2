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


async def all_ready(pool: PooledSandboxes) -> None:
    await asyncio.wait([ready._starting for ready in pool._ready])


def is_of_the_pool(box: Sandbox) -> bool:
    return isinstance(box, PooledSandbox) and box._taken is not None and box._own is None


async def test_sessions_start_at_once_and_are_alone(pool: PooledSandboxes) -> None:
    boxes = [pool.make(spec()) for _ in range(3)]
    assert len(pool._ready) == 2
    await all_ready(pool)
    first, second, third = boxes
    began = time.monotonic()
    await first.start()
    assert time.monotonic() - began < START
    assert first.workspace != Sandbox.workspace and await text(first, "pwd") == first.workspace
    await first.exec("touch mine; export V=1", timeout=10)
    await second.start()
    assert await text(second, "ls; echo $V") == "" and second.workspace != first.workspace
    await third.start()  # begun when the first was taken
    assert all(is_of_the_pool(box) for box in boxes) and len(pool._ready) == 2
    for box in boxes:
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
    await all_ready(pool)
    await pool._ready[0].sandbox.stop()
    await box.start()
    assert not is_of_the_pool(box) and await text(box, "echo works") == "works"
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
