"""A kind of sandbox that takes its time to start, as a package of one's own could bring it."""

from __future__ import annotations

import asyncio

from gristmill.sandbox.base import Capabilities
from gristmill.sandbox.host import HostSandbox, HostSandboxes

START = 1.5  # seconds


class SlowSandbox(HostSandbox):
    """Notes whom it was made for."""

    async def start(self) -> None:
        await asyncio.sleep(START)
        await super().start()
        await self.write("made_for", self.spec.session_id.encode())


class SlowSandboxes(HostSandboxes):
    capabilities = Capabilities(isolated=False)

    def _make(self, spec):  # type: ignore[no-untyped-def]
        return SlowSandbox(spec, self._place, self._limits)
