"""The shell driver of sandboxes that share a directory with the host.

A command's text, stdin and output pass by files and FIFOs in a directory of the host that is visible inside, read-only
where there are namespaces, so there is nothing to quote and nothing too long (`inside` draws it). An adapter says where
things are inside and which program puts the supervisor there; the rest is the same for all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import posixpath
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gristmill.errors import SandboxError
from gristmill.sandbox.base import Capabilities, Sandbox, SandboxSpec
from gristmill.sandbox.cgroups import Group
from gristmill.sandbox.disk import DiskWatch
from gristmill.sandbox.inside import Inside, prepare
from gristmill.sandbox.limits import WorkerLimits
from gristmill.sandbox.reaper import WorkerPlace, remove_tree
from gristmill.sandbox.supervised import SupervisedSandbox
from gristmill.sandbox.supervisor import GRACE_SECONDS, Supervisor


class ShellSandbox(SupervisedSandbox):
    """A sandbox whose inside runs the supervisor.

    Args:
        spec: what the session asks of it.
        place: where it gets directories of its own on the host. `workspace` in the first one is the one inside; `io`
            in the second one is what it shares with its supervisor.
        limits: what it is held to.

    `on_start` is called when it starts.
    """

    on_start: Callable[[], None] | None = None

    def __init__(self, spec: SandboxSpec, place: WorkerPlace, limits: WorkerLimits) -> None:
        super().__init__(spec)
        self.limits = limits.of(spec.limits)
        self._bounds, self._most = limits.bounds(self.limits)
        self._group: Group | None = limits.group(self.limits)
        self._place = place
        self._directories: tuple[Path, Path] | None = None
        self._running: Supervisor | None = None
        self._stopping: asyncio.Future[None] | None = None

    @abstractmethod
    def _inside(self, directory: Path, memory: Path) -> Inside:
        """Where things are inside; makes `directory/workspace` and what else the adapter needs."""

    @abstractmethod
    def _argv(self, directory: Path, memory: Path, inside: Inside) -> list[str]:
        """The command line that runs `bash <io>/init` inside."""

    def _first_process(self, pid: int) -> int:
        """The number of the supervisor on the host, `pid` being that of the program that was started."""
        return pid

    def _destroy(self, directory: Path) -> None:
        """End what may be left when the supervisor has gone, before the directories are removed."""

    async def start(self) -> None:
        if self._directories is not None or self._running is not None or self._stopping is not None:
            raise SandboxError("A sandbox starts once.")
        try:
            self._directories = directory, memory = self._place.session()
            if self.on_start:
                self.on_start()
            inside = dataclasses.replace(self._inside(directory, memory), bounds=self._bounds, most=self._most)
            self.workspace = inside.workspace
            cwd = self._first_directory(directory / "workspace")
            prepare(memory / "io", inside, cwd, self.spec.env)
        except (OSError, ValueError) as error:
            raise SandboxError(f"The sandbox could not be prepared: {error}.") from error
        running = self._running = Supervisor(f"{memory}/io", inside.mark, self._group)
        await running.start(self._argv(directory, memory, inside))
        # Nothing but the supervisor runs by now.
        await running.enter_group(self._first_process(running.pid))

    @property
    def directory(self) -> Path | None:
        """What it has on the host's disk; None when it is not running."""
        return self._directories[0] if self._directories and self._stopping is None else None

    def lose(self, reason: str) -> None:
        """End it now; whoever uses it gets a `SandboxError` with this reason."""
        if self._running:
            self._running.fail(reason)
        self._stopping = self._stopping or asyncio.ensure_future(self._stop())

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    def cleanup(self) -> None:
        if self._running:
            self._running.stop_now()
        self._remove()

    def _first_directory(self, host_workspace: Path) -> str:
        """The spec's working directory as an absolute path; made where it lies in the workspace."""
        path = posixpath.normpath(posixpath.join(self.workspace, self.spec.cwd))
        if path.startswith(self.workspace + "/"):
            # The sandbox has not started, so nothing on the way can be a link that leads out.
            (host_workspace / path.removeprefix(self.workspace + "/")).mkdir(parents=True, exist_ok=True)
        return path

    async def _stop(self) -> None:
        if self._running:
            await self._running.stop()
        # Beside the event loop, because a package manager may have left a hundred thousand files.
        removing = asyncio.ensure_future(asyncio.to_thread(self._remove))
        await asyncio.wait((removing,), timeout=GRACE_SECONDS)

    def _remove(self) -> None:
        directories, self._directories = self._directories, None
        if directories is not None:
            if self._group:
                self._group.remove()
            self._destroy(directories[0])
            for directory in directories:
                remove_tree(directory)


class ShellSandboxes(ABC):
    """Makes the sandboxes of one kind for one worker; the base of providers.

    Args:
        root: where their directories lie; the system's temporary directory if None.
        options: there are none for these kinds.
    """

    capabilities: Capabilities

    def __init__(self, root: Path | None = None, *, options: Mapping[str, str] = {}) -> None:
        self._place = WorkerPlace(root)
        self._limits = WorkerLimits(isolated=self.capabilities.isolated)
        self.capabilities = msgspec.structs.replace(self.capabilities, limits=self._limits.held)
        self._made: weakref.WeakSet[ShellSandbox] = weakref.WeakSet()
        self._watch = DiskWatch(self._place.path, lambda: self._made)

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started."""
        sandbox = self._make(spec)
        sandbox.capabilities = self.capabilities
        sandbox.on_start = self._watch.begin
        self._made.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        for sandbox in self._made:
            sandbox.cleanup()
        self._limits.close()
        self._place.close()

    @abstractmethod
    def _make(self, spec: SandboxSpec) -> ShellSandbox: ...
