"""`singularity`: an instance of Apptainer or SingularityCE for every session, where there is no container engine.

Image, processes, IPC, environment and, by default, network are its own; it sees no directory of the host but the
session's private ones. Commands run as the user who runs gristmill, without any privilege. The first program can be
killed from inside, so another one takes its place then.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
import re
import tarfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from gristmill.errors import SandboxError
from gristmill.sandbox import docker_bash
from gristmill.sandbox.base import Capabilities, Sandbox, SandboxSpec
from gristmill.sandbox.child_stream import ChildStream
from gristmill.sandbox.inside import ENVIRONMENT, StreamInside, exports
from gristmill.sandbox.lanes import LaneSupervisor
from gristmill.sandbox.process import kill_marked
from gristmill.sandbox.reaper import MARK, WorkerPlace, remove_tree
from gristmill.sandbox.singularity_images import Images
from gristmill.sandbox.singularity_program import ASK_SECONDS, Program
from gristmill.sandbox.stream import Receiver, Stream
from gristmill.sandbox.supervised import SupervisedSandbox

IO = "/run/gristmill"
WORKSPACE = "/workspace"
HOME = "/home/agent"
INSTANCE_SECONDS = 120.0  # for an instance to start
TREE_SECONDS = 2.0  # for its files to be removed
AS_THE_IMAGE_SAYS = ("PATH", "SHELL", "SHLVL")


class SingularitySandbox(SupervisedSandbox):
    """One instance."""

    capabilities = Capabilities(
        isolated=True, images=True, network_switch=True, limits=frozenset({"memory_mb", "cpus"})
    )
    workspace = WORKSPACE

    def __init__(self, spec: SandboxSpec, worker: SingularitySandboxes) -> None:
        super().__init__(spec)
        self._worker = worker
        self._begun = False
        self._directory: Path | None = None
        self._name = ""
        self._starting: asyncio.Task[tuple[int, str]] | None = None
        self._running: LaneSupervisor | None = None
        self._stopping: asyncio.Future[None] | None = None

    async def start(self) -> None:
        if self._begun or self._stopping is not None:
            raise SandboxError("A sandbox starts once.")
        self._begun = True
        if not self.spec.image:
            raise SandboxError("An instance needs an image.", "Give rows an `image` or set TERMINAL_SINGULARITY_IMAGE.")
        exports(self.spec.env)
        image = await self._worker.images.get(self.spec.image)
        try:
            directory = self._directory = self._worker.place.session()[0]
            for name in ("io", "workspace", "home", "temporary"):
                (directory / name).mkdir(mode=0o700)
        except OSError as error:
            raise SandboxError(f"The sandbox could not be prepared: {error}.") from error
        self._name = self._worker.program.name(f"{self._worker.place.token}.{directory.name}")
        try:
            await self._run(image, directory, self._worker.shells.get(image))
        except SandboxError as error:
            if not re.search(r"bash.*(not found|no such file)", str(error), re.IGNORECASE):
                raise
            await self._end()
            self._worker.shells[image] = await asyncio.to_thread(self._worker.carry)
            await self._run(image, directory, self._worker.shells[image])

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    def cleanup(self) -> None:
        if self._running is not None:
            self._running.stop()
        if self._starting is not None:
            self._worker.program.stop_now(self._name)
            self._starting = None
        self._remove()

    # Beginning.

    async def _run(self, image: str, directory: Path, carried: tuple[Path, tuple[str, ...]] | None) -> None:
        program = self._worker.program
        options = self._options(directory)
        if carried:
            options += ["--bind", f"{carried[0]}:{docker_bash.DIRECTORY}:ro"]
        starting = program.call("--silent", "instance", "start", *options, image, self._name, timeout=INSTANCE_SECONDS)
        # Shielded, so that what was asked for is known when it is time to end it.
        self._starting = asyncio.ensure_future(starting)
        code, said = await asyncio.shield(self._starting)
        if code:
            said = said.rpartition("FATAL:")[2].strip() or f"status {code}"
            raise SandboxError(f"The instance could not be started: {said}.")
        running = self._running = LaneSupervisor(self._connect, self._inside(carried), mortal=True)
        await running.start()

    def _options(self, directory: Path) -> list[str]:
        limits = self.spec.limits
        options = ["--containall", "--no-home", "--writable-tmpfs", "--workdir", f"{directory}/temporary"]
        for name, inside in (("io", IO), ("workspace", WORKSPACE), ("home", HOME)):
            options += ["--bind", f"{directory}/{name}:{inside}"]
        if os.geteuid() == 0:
            options.append("--no-privs")
        if not self.spec.network:
            options += ["--net", "--network", "none"]
        if limits.memory_mb:
            options += ["--memory", str(limits.memory_mb << 20), "--memory-swap", str(limits.memory_mb << 20)]
        if limits.cpus:
            options += ["--cpus", f"{limits.cpus:g}"]
        return options

    def _inside(self, carried: tuple[Path, tuple[str, ...]] | None) -> StreamInside:
        own = {name: value for name, value in ENVIRONMENT.items() if name not in AS_THE_IMAGE_SAYS}
        variables = exports({**own, "HOME": HOME, **self.spec.env})
        more = f"PATH=$PATH:{docker_bash.PATH_ENTRY}\n" if carried else ""
        # When the worker has gone its stream ends, and then what it started must not go on.
        ended = """[[ ${first-} ]] && trap 'kill_all "$mark*" ""' EXIT\n"""
        return StreamInside(
            io=IO,
            workspace=WORKSPACE,
            cwd=posixpath.normpath(posixpath.join(WORKSPACE, self.spec.cwd)),
            shell=carried[1] if carried else ("bash",),
            mark=self._mark,
            prelude=f"unset ${{!APPTAINER*}} ${{!SINGULARITY*}}\n{variables}{more}{ended}",
        )

    @property
    def _mark(self) -> str:
        """Of its processes, by which they are found from outside too."""
        assert self._directory is not None
        return f"{self._worker.place.token}.{self._directory.name}."

    async def _connect(self, argv: Sequence[str], receiver: Receiver) -> Stream:
        assert self._running is not None
        program = self._worker.program
        command = [program.path, "--silent", "exec", "--cleanenv", f"instance://{self._name}"]
        return ChildStream([*command, *(argv or self._running.first_argv)], program.env, receiver)

    # End.

    async def _end(self) -> None:
        """End the instance, if there is one. Raises `SandboxError` where that cannot be done."""
        if self._running is not None:
            self._running.stop()
        if self._starting is not None:
            await asyncio.wait((self._starting,), timeout=ASK_SECONDS / 4)
            self._starting.cancel()
            await self._worker.program.stop(self._name)
            self._starting = None

    async def _stop(self) -> None:
        try:
            await self._end()
        finally:
            removing = asyncio.ensure_future(asyncio.to_thread(self._remove))
            await asyncio.wait((removing,), timeout=TREE_SECONDS)

    def _remove(self) -> None:
        if self._directory is not None:
            kill_marked(MARK, self._mark)
            remove_tree(self._directory)


class SingularitySandboxes:
    """Makes the instances of one worker.

    Args:
        root: where their directories lie on the host; the system's temporary directory if None.
        options: there are none for this kind; the program reads its own variables.
    """

    capabilities = SingularitySandbox.capabilities

    def __init__(self, root: Path | None = None, *, options: Mapping[str, str] = {}) -> None:
        self.program = Program()
        for name in self.program.leftovers():
            self.program.stop_now(name)
        self.place = WorkerPlace(root)
        self.images = Images(self.program)
        self.shells: dict[str, tuple[Path, tuple[str, ...]]] = {}  # for images without bash
        self._made: weakref.WeakSet[SingularitySandbox] = weakref.WeakSet()

    @staticmethod
    def problem(options: Mapping[str, str] = {}) -> str:
        """Why no instance can be made here, with the mend; empty where the program answers."""
        try:
            Program().leftovers()
        except SandboxError as error:
            return str(error)
        return ""

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started."""
        sandbox = SingularitySandbox(spec, self)
        self._made.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        for sandbox in self._made:
            with contextlib.suppress(SandboxError):
                sandbox.cleanup()
        self.place.close()

    def carry(self) -> tuple[Path, tuple[str, ...]]:
        """A directory with this machine's bash for images without one, and the command that it is inside."""
        archive, shell = docker_bash.carried("")
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(self.place.path / "bash")
        return self.place.path / "bash" / docker_bash.DIRECTORY.lstrip("/"), shell
