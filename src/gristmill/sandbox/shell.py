"""The one shell driver: `exec`, `spawn`, `read` and `write` of every sandbox inside which bash can run.

A command's text, stdin and output pass by files and FIFOs in a directory of the host that is visible inside, read-only
where there are namespaces, so there is nothing to quote and nothing too long (`inside` draws it). An adapter says where
things are inside and which program puts the supervisor there; the rest is the same for all.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

from gristmill.errors import SandboxError
from gristmill.sandbox.base import ExecResult, Job, Sandbox, SandboxSpec
from gristmill.sandbox.calls import ShellJob
from gristmill.sandbox.inside import Inside, prepare
from gristmill.sandbox.output import Output
from gristmill.sandbox.reaper import WorkerPlace, remove_tree
from gristmill.sandbox.supervisor import GRACE_SECONDS, START_SECONDS, Supervisor

FILE_SECONDS = 60.0  # for reading or writing one file


class ShellSandbox(Sandbox):
    """A sandbox whose inside runs the supervisor.

    Args:
        spec: what the session asks of it.
        place: where it gets a directory of its own on the host; its `workspace` below is the one inside.
    """

    def __init__(self, spec: SandboxSpec, place: WorkerPlace) -> None:
        super().__init__(spec)
        self._place = place
        self._directory: Path | None = None
        self._running: Supervisor | None = None
        self._turn = asyncio.Lock()
        self._stopping: asyncio.Future[None] | None = None

    @abstractmethod
    def _inside(self, directory: Path) -> Inside:
        """Where things are inside; makes `directory/workspace` and what else the adapter needs."""

    @abstractmethod
    def _argv(self, directory: Path, inside: Inside) -> list[str]:
        """The command line that runs `bash <io>/init` inside."""

    def _destroy(self, directory: Path) -> None:
        """End what may be left when the supervisor has gone, before the directory is removed."""

    async def start(self) -> None:
        if self._directory is not None or self._running is not None or self._stopping is not None:
            raise SandboxError("A sandbox starts once.")
        try:
            directory = self._directory = self._place.session()
            inside = self._inside(directory)
            self.workspace = inside.workspace
            cwd = self._first_directory(directory / "workspace")
            prepare(directory / "io", inside, cwd, self.spec.env)
        except (OSError, ValueError) as error:
            raise SandboxError(f"The sandbox could not be prepared: {error}.") from error
        self._running = Supervisor(f"{directory}/io")
        await self._running.start(self._argv(directory, inside))

    async def exec(
        self, command: str, *, timeout: float, workdir: str = "", stdin: bytes = b"", stateful: bool = True
    ) -> ExecResult:
        text = _records(workdir, command)
        if not stateful:
            return await self._exec("y", text, stdin, timeout)
        async with self._turn:
            return await self._exec("x", text, stdin, timeout)

    async def spawn(self, command: str, *, workdir: str = "") -> Job:
        text = _records(workdir, command)
        supervisor = self._supervisor
        output = Output()
        call = supervisor.open(output)
        try:
            await supervisor.place(call, ".sh", text)
            job = ShellJob(call, command, output, f"{supervisor.io}/{call.id}.in", supervisor.kill)
            supervisor.order(f"j {call.id} 1")
            async with asyncio.timeout(START_SECONDS):
                job.pid = await call.launched
        except BaseException as error:
            supervisor.abandon(call)
            if isinstance(error, OSError):  # TimeoutError is one
                raise supervisor.fail(f"A job could not be started: {error or 'no answer'}.") from error
            raise
        call.ended.add_done_callback(lambda _: supervisor.close(call, keep_output=True))
        return job

    async def read(self, path: str, limit: int) -> bytes:
        return await self._file(f"g {{}} {limit}", path, Output(limit, 0))

    async def write(self, path: str, data: bytes) -> None:
        await self._file("p {}", path, Output(), data)

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    def cleanup(self) -> None:
        if self._running:
            self._running.stop_now()
        self._remove()

    @property
    def _supervisor(self) -> Supervisor:
        if self._running is None:
            raise SandboxError("The sandbox was not started.")
        return self._running

    def _first_directory(self, host_workspace: Path) -> str:
        """The spec's working directory as an absolute path; made where it lies in the workspace."""
        path = posixpath.normpath(posixpath.join(self.workspace, self.spec.cwd))
        if path.startswith(self.workspace + "/"):
            # The sandbox has not started, so nothing on the way can be a link that leads out.
            (host_workspace / path.removeprefix(self.workspace + "/")).mkdir(parents=True, exist_ok=True)
        return path

    async def _exec(self, verb: str, text: bytes, stdin: bytes, timeout: float) -> ExecResult:
        started = time.monotonic()
        supervisor = self._supervisor
        output = Output()
        call = supervisor.open(output)
        try:
            await supervisor.place(call, ".sh", text)
            if stdin:
                await supervisor.place(call, ".in", stdin)
            supervisor.order(f"{verb} {call.id} {int(bool(stdin))}")
            code = await call.result(timeout)
            if code is None:
                await supervisor.kill(call)
        except BaseException:
            supervisor.abandon(call)
            raise
        supervisor.close(call)
        kept, dropped = output.collect()
        return ExecResult(
            output=kept,
            exit_code=124 if code is None else code,
            dropped=dropped,
            timed_out=code is None,
            note=call.note and f"The directory {call.note} no longer exists; the command ran in {self.workspace}.",
            seconds=time.monotonic() - started,
        )

    async def _file(self, order: str, path: str, output: Output, data: bytes | None = None) -> bytes:
        supervisor = self._supervisor
        call = supervisor.open(output)
        call.trusted = True
        try:
            await supervisor.place(call, ".sh", _records(path))
            if data is not None:
                await supervisor.place(call, ".in", data)
            supervisor.order(order.format(call.id))
            if await call.result(FILE_SECONDS) is None:
                await supervisor.kill(call)
        except BaseException:
            supervisor.abandon(call)
            raise
        supervisor.close(call)
        kept, _ = output.collect()
        call.raise_for(path, b"" if data is None else kept)
        return kept

    async def _stop(self) -> None:
        if self._running:
            await self._running.stop()
        # Beside the event loop, because a package manager may have left a hundred thousand files.
        removing = asyncio.ensure_future(asyncio.to_thread(self._remove))
        await asyncio.wait((removing,), timeout=GRACE_SECONDS)

    def _remove(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            self._destroy(directory)
            remove_tree(directory)


class ShellSandboxes(ABC):
    """Makes the sandboxes of one kind for one worker; the base of providers.

    Args:
        root: where their directories lie; the system's temporary directory if None.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._place = WorkerPlace(root)
        self._made: weakref.WeakSet[ShellSandbox] = weakref.WeakSet()

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started."""
        sandbox = self._make(spec)
        self._made.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        for sandbox in self._made:
            sandbox.cleanup()
        self._place.close()

    @abstractmethod
    def _make(self, spec: SandboxSpec) -> ShellSandbox: ...


def _records(*texts: str) -> bytes:
    """Texts with a NUL after each. Raises `ValueError` where one holds a NUL itself."""
    if any("\0" in text for text in texts):
        raise ValueError("A NUL byte can be in no command and no path.")
    return b"".join(text.encode("utf-8", "replace") + b"\0" for text in texts)
