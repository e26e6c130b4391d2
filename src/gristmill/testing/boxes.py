"""What the conformance suite of sandboxes works with: sandboxes that stop themselves, processes told apart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gristmill.sandbox.base import Sandbox, SandboxProvider, SandboxSpec

_numbers = itertools.count(1)


def spec(**fields: object) -> SandboxSpec:
    """A spec with a session of its own."""
    return SandboxSpec(session_id=f"session-{next(_numbers)}", run_id="suite", **fields)  # type: ignore[arg-type]


def unique_sleep() -> str:
    """A command that sleeps for half an hour and can be told from all others in this machine's list of processes."""
    return f"sleep 18{os.getpid()}.{next(_numbers)}{random.randrange(10**6)}"


def running(command: str) -> list[int]:
    """Processes of this machine with that command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().replace(b"\0", b" ").strip() == command.encode():
                    found.append(int(entry.name))
    return found


async def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether a condition comes true within some time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.01)
    return True


@contextlib.asynccontextmanager
async def started(provider: SandboxProvider, **fields: object) -> AsyncIterator[Sandbox]:
    """A sandbox that runs, and is stopped in the end."""
    sandbox = provider.make(spec(**fields))
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()


async def text(sandbox: Sandbox, command: str, timeout: float = 20.0) -> str:
    """What a command prints, without the last line's end."""
    return (await sandbox.exec(command, timeout=timeout)).output.decode().rstrip("\n")
