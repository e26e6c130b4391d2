"""A sandbox that starts when it is first needed: a session that only talks or searches the web pays for none."""

from __future__ import annotations

import asyncio

from gristmill.errors import SandboxError
from gristmill.sandbox.base import Capabilities, ExecResult, Job, Sandbox


class LazySandbox(Sandbox):
    """Wraps a sandbox that was not started; `start` does nothing until something is asked of it.

    Where several calls come first at the same time, it is started once.
    """

    def __init__(self, inner: Sandbox) -> None:
        super().__init__(inner.spec)
        self._inner = inner
        self._lock = asyncio.Lock()
        self.started = False
        self._failed: SandboxError | None = None

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the wrapped one."""
        return self._inner.capabilities

    @property
    def workspace(self) -> str:  # type: ignore[override]
        """That of the wrapped one."""
        return self._inner.workspace

    async def start(self) -> None:
        """Start now, if it has not been; a start that failed fails again in the same way."""
        if self.started:
            return
        async with self._lock:
            if self._failed is not None:
                raise self._failed
            if not self.started:
                try:
                    await self._inner.start()
                except SandboxError as error:
                    self._failed = error
                    raise
                self.started = True

    async def exec(
        self, command: str, *, timeout: float, workdir: str = "", stdin: bytes = b"", stateful: bool = True
    ) -> ExecResult:
        await self.start()
        return await self._inner.exec(command, timeout=timeout, workdir=workdir, stdin=stdin, stateful=stateful)

    async def spawn(self, command: str, *, workdir: str = "") -> Job:
        await self.start()
        return await self._inner.spawn(command, workdir=workdir)

    async def read(self, path: str, limit: int) -> bytes:
        await self.start()
        return await self._inner.read(path, limit)

    async def write(self, path: str, data: bytes) -> None:
        await self.start()
        await self._inner.write(path, data)

    async def stop(self) -> None:
        # Also after a failed start: the port says that `stop` cleans up what there is.
        await self._inner.stop()

    def cleanup(self) -> None:
        self._inner.cleanup()
