"""Sandboxes that are started before anyone asks, for kinds that take seconds to start.

A session whose row asks for nothing of its own gets one that is ready, or the one that has been starting longest, and
the pool starts another. Sessions with an image or a directory of their own get theirs as without a pool.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping

import msgspec

from gristmill.config import SandboxConfig
from gristmill.errors import SandboxError
from gristmill.sandbox.base import Capabilities, ExecResult, Job, Sandbox, SandboxProvider, SandboxSpec

CHECK_SECONDS = 15.0  # for one that has waited to show that it still works


def pooled(inner: SandboxProvider, config: SandboxConfig, run_id: str) -> SandboxProvider:
    """A provider with the pool that the settings ask for; itself where that would gain nothing."""
    can = inner.capabilities
    if not config.pool or can.instant or (can.images and not config.image):
        return inner
    like = SandboxSpec(
        session_id="pool",
        run_id=run_id,
        image=config.image if can.images else "",
        cwd=config.cwd,
        network=config.network,
        limits=config.limits,
    )
    return PooledSandboxes(inner, config.pool, like)


class PooledSandboxes:
    """A provider of sandboxes of `inner`, up to `size` of which are kept ready; `like` is what those are asked for."""

    def __init__(self, inner: SandboxProvider, size: int, like: SandboxSpec) -> None:
        self.capabilities = inner.capabilities
        self._inner = inner
        self._size = size
        self._like = like
        self._numbers = itertools.count(1)
        self._ready: deque[Ready] = deque()
        self._drained = False

    @staticmethod
    def problem(options: Mapping[str, str]) -> str:
        """A pool has none; its kind is asked itself."""
        return ""

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started. Needs a running event loop, in which others begin to start."""
        if msgspec.structs.replace(spec, session_id=self._like.session_id) != self._like:
            return self._inner.make(spec)
        self._fill()
        return PooledSandbox(spec, self)

    def take(self) -> Ready | None:
        """The one that began to start first, None where there is none; another begins."""
        taken = self._ready.popleft() if self._ready else None
        self._fill()
        return taken

    def fresh(self, spec: SandboxSpec) -> Sandbox:
        """One that nobody has begun to start."""
        return self._inner.make(spec)

    async def drain(self) -> None:
        """Stop all that nobody took; no more are started."""
        self._drained = True
        await asyncio.gather(*(ready.stop() for ready in self._ready), return_exceptions=True)
        self._ready.clear()

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        self._inner.close()

    def _fill(self) -> None:
        while len(self._ready) < self._size and not self._drained:
            name = f"{self._like.session_id}-{next(self._numbers)}"
            self._ready.append(Ready(self._inner.make(msgspec.structs.replace(self._like, session_id=name))))


class Ready:
    """A sandbox that is starting, or has started, for nobody yet."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._starting = asyncio.ensure_future(sandbox.start())
        # Whether or not anyone takes it, what went wrong counts as seen.
        self._starting.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def works(self) -> bool:
        """Wait until it has started; whether it did, and still answers if that is a while ago."""
        waited = self._starting.done()
        try:
            await asyncio.shield(self._starting)
            return not waited or not (await self.sandbox.exec(":", timeout=CHECK_SECONDS, stateful=False)).exit_code
        except SandboxError:
            return False

    async def stop(self) -> None:
        """Stop it, wherever it is."""
        self._starting.cancel()
        await asyncio.wait([self._starting])
        await self.sandbox.stop()


class PooledSandbox(Sandbox):
    """A session's sandbox: one of the pool that works, else one of its own."""

    def __init__(self, spec: SandboxSpec, pool: PooledSandboxes) -> None:
        super().__init__(spec)
        self._pool = pool
        self._begun = False
        self._taken: Ready | None = None
        self._own: Sandbox | None = None
        self._running: Sandbox | None = None

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the kind."""
        return self._pool.capabilities

    @property
    def workspace(self) -> str:  # type: ignore[override]
        """That of the one it has."""
        return self._running.workspace if self._running else Sandbox.workspace

    async def start(self) -> None:
        if self._begun:
            raise SandboxError("A sandbox starts once.")
        self._begun = True
        self._taken = self._pool.take()
        if self._taken and await self._taken.works():
            self._running = self._taken.sandbox
            return
        self._own = self._pool.fresh(self.spec)
        await self._own.start()
        self._running = self._own

    async def exec(
        self, command: str, *, timeout: float, workdir: str = "", stdin: bytes = b"", stateful: bool = True
    ) -> ExecResult:
        return await self._inner.exec(command, timeout=timeout, workdir=workdir, stdin=stdin, stateful=stateful)

    async def spawn(self, command: str, *, workdir: str = "") -> Job:
        return await self._inner.spawn(command, workdir=workdir)

    async def read(self, path: str, limit: int) -> bytes:
        return await self._inner.read(path, limit)

    async def write(self, path: str, data: bytes) -> None:
        await self._inner.write(path, data)

    async def stop(self) -> None:
        self._begun = True
        if self._taken:
            await self._taken.stop()
        if self._own:
            await self._own.stop()

    def cleanup(self) -> None:
        for sandbox in (self._taken and self._taken.sandbox, self._own):
            if sandbox:
                sandbox.cleanup()

    @property
    def _inner(self) -> Sandbox:
        if self._running is None:
            raise SandboxError("The sandbox was not started.")
        return self._running
