"""Watches the disk on which workspaces lie: before it is full, the sandbox that holds most of it is ended.

An ordinary user can put no quota on a directory, so this is the bound of those that lie on the disk. It does not see
files that were removed while they were open. A workspace in memory (`Limits.disk_mb`) is bounded exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

RESERVE = 4 << 30  # bytes that are to stay free; on a small disk a tenth of it
BLAME = 1 << 30  # bytes; who holds less is not to blame
INODE = 16 << 10  # bytes that a file counts beside its content: about what a file system has for each
LOOK_SECONDS = 1.0
AGAIN_SECONDS = 15.0  # after nobody was found to blame, because looking is work


class Tenant(Protocol):
    """A sandbox that is watched."""

    @property
    def directory(self) -> Path | None:
        """What it has on the disk; None when it is not running."""
        ...

    def lose(self, reason: str) -> None:
        """End it now; whoever uses it gets a `SandboxError` with this reason."""
        ...


class DiskWatch:
    """Looks as long as a sandbox runs. `tenants` gives all of the worker's; `path` is where their directories lie."""

    def __init__(
        self, path: Path, tenants: Callable[[], Iterable[Tenant]], *, reserve: int = 0, blame: int = BLAME
    ) -> None:
        self._path = path
        self._tenants = tenants
        self._reserve = reserve
        self._blame = blame
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A sandbox starts; needs a running event loop."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        while tenants := {tenant: path for tenant in self._tenants() if (path := tenant.directory)}:
            pause = LOOK_SECONDS
            if self._missing() > 0:
                pause = LOOK_SECONDS if await self._relieve(tenants) else AGAIN_SECONDS
            await asyncio.sleep(pause)

    def _missing(self) -> int:
        """Bytes by which the free space falls short; a disk without free inodes is full too."""
        with contextlib.suppress(OSError):
            found = os.statvfs(self._path)
            free = found.f_bavail * found.f_frsize
            if found.f_files:
                free = min(free, found.f_favail * INODE)
            return (self._reserve or min(RESERVE, found.f_blocks * found.f_frsize // 10)) - free
        return 0

    async def _relieve(self, tenants: dict[Tenant, Path]) -> bool:
        """End the largest, if there is one to blame."""
        sizes = {tenant: await asyncio.to_thread(size, path) for tenant, path in tenants.items()}
        largest = max(sizes, key=lambda tenant: sizes[tenant])
        if sizes[largest] < self._blame:
            return False
        largest.lose(
            f"The disk is nearly full, and of all sessions this one held most, {sizes[largest] >> 20} MiB. "
            "--sandbox_disk bounds what each may hold."
        )
        return True


def size(top: Path) -> int:
    """Bytes that a directory with all that is in it takes on its disk, as far as it can be read."""
    total = 0
    pending = [str(top)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512 + INODE
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return total
