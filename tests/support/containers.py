"""Docker sandboxes for tests, and what is left of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator

import msgspec

from gristmill.sandbox.base import Sandbox, SandboxSpec
from gristmill.sandbox.docker import DockerSandboxes
from gristmill.types import Limits
from support.images import FULL

_numbers = itertools.count(1)


class Imaged(DockerSandboxes):
    """Takes an image where the spec names none."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        return super().make(msgspec.structs.replace(spec, image=spec.image or FULL))


@contextlib.asynccontextmanager
async def container(
    provider: DockerSandboxes,
    image: str = FULL,
    *,
    run: str = "tests",
    network: bool = False,
    limits: Limits | None = None,
) -> AsyncIterator[Sandbox]:
    """A container that runs, and is removed in the end."""
    session = f"session-{next(_numbers)}"
    spec = SandboxSpec(session_id=session, run_id=run, image=image, network=network, limits=limits or Limits())
    sandbox = provider.make(spec)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()


async def text(sandbox: Sandbox, command: str, timeout: float = 20.0) -> str:
    """What a command prints, without the last line's end."""
    return (await sandbox.exec(command, timeout=timeout)).output.decode().rstrip("\n")
