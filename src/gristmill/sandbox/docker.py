"""`docker`: a container for every session, by Docker Engine or Podman.

The supervisor is the container's first process, attached before it starts: nothing inside can kill it, and when the
worker is gone its stdin ends, so it ends, and the engine removes the container. No directory of the host is mounted;
of variables only the image's and the spec's enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import aiodocker
import aiohttp

from gristmill.errors import SandboxError
from gristmill.sandbox import docker_bash, docker_leftovers
from gristmill.sandbox.base import Capabilities, Sandbox, SandboxSpec
from gristmill.sandbox.docker_engine import Address, find
from gristmill.sandbox.docker_images import Image, Images
from gristmill.sandbox.docker_leftovers import REMOVE_SECONDS
from gristmill.sandbox.inside import ENVIRONMENT, StreamInside
from gristmill.sandbox.lanes import LaneSupervisor
from gristmill.sandbox.stream import Receiver, Stream
from gristmill.sandbox.supervised import SupervisedSandbox

IO = "/run/gristmill"
IO_BYTES = 256 << 20  # in memory, for texts and stdin of commands
WORKSPACE = "/workspace"  # for images without a WORKDIR
ENGINE_SECONDS = 120.0  # for the engine to make or start one container
STARTS_AT_ONCE = 8  # in one worker; more would only wait for each other in the engine
ROOT = ("", "0", "root", "0:0", "root:root")
AS_THE_IMAGE_SAYS = ("PATH", "SHELL", "SHLVL")
# Which limit the engine must say that it can keep, or it would drop it silently.
KEEPS = {"memory_mb": "MemoryLimit", "cpus": "CpuCfsQuota", "processes": "PidsLimit"}


class DockerSandbox(SupervisedSandbox):
    """One container."""

    capabilities = Capabilities(
        isolated=True,
        images=True,
        network_switch=True,
        limits=frozenset({"memory_mb", "disk_mb", "cpus", "processes"}),
    )

    def __init__(self, spec: SandboxSpec, provider: DockerSandboxes) -> None:
        super().__init__(spec)
        session = re.sub(r"[^a-zA-Z0-9]+", "-", spec.session_id).strip("-")[:40]
        self.name = f"gristmill-{session}-{secrets.token_hex(6)}"
        self._provider = provider
        self._begun = False
        self._creating: asyncio.Task[Any] | None = None
        self._running: LaneSupervisor | None = None
        self._stopping: asyncio.Future[None] | None = None

    async def start(self) -> None:
        if self._begun or self._stopping is not None:
            raise SandboxError("A sandbox starts once.")
        self._begun = True
        if not self.spec.image:
            raise SandboxError("A container needs an image.", "Give rows an `image`, or set TERMINAL_DOCKER_IMAGE.")
        engine = await self._provider.join(self)
        await self._check_limits(engine)
        image = await engine.images.get(self.spec.image)
        async with engine.starts:
            try:
                await self._run(engine, image, engine.shells.get(image.id))
            except _NoBash:
                await self._remove()
                engine.shells[image.id] = await asyncio.to_thread(docker_bash.carried, image.architecture)
                await self._run(engine, image, engine.shells[image.id])
            except SandboxError:
                engine.images.forget(self.spec.image)  # it may have been removed since
                raise

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    def cleanup(self) -> None:
        if self._running is not None:
            self._running.stop()
        if self._creating is not None and self._provider.engine is not None:
            with contextlib.suppress(OSError, SandboxError):
                docker_leftovers.remove(self._provider.engine.address, self.name)

    # Beginning.

    async def _check_limits(self, engine: Engine) -> None:
        wanted = [name for name in KEEPS if getattr(self.spec.limits, name)]
        if wanted and engine.abilities is None:
            engine.abilities = await self._answer(engine.client.system.info())
        for name in wanted:
            if not (engine.abilities or {}).get(KEEPS[name]):
                raise SandboxError(f"The engine at {engine.address.url} can keep no limit on {name} here.")

    async def _run(self, engine: Engine, image: Image, carried: tuple[bytes, tuple[str, ...]] | None) -> None:
        self.workspace = image.directory if image.directory not in ("", "/") else WORKSPACE
        if "\0" in self.spec.cwd:
            raise SandboxError("The name of the working directory holds a NUL byte.")
        cwd = posixpath.normpath(posixpath.join(self.workspace, self.spec.cwd))
        shell = carried[1] if carried else ("bash",)
        limited = bool(self.spec.limits.processes)
        inside = StreamInside(IO, self.workspace, cwd, shell, limited=limited)
        running = self._running = LaneSupervisor(self._connect, inside)
        settings = self._settings(image, running.first_argv)
        if carried:
            path = image.variables.get("PATH", ENVIRONMENT["PATH"])
            settings["Env"].append(f"PATH={path}:{docker_bash.PATH_ENTRY}")
        container = await self._answer(self._create(engine, settings))
        if image.directory in ("", "/") and image.user not in ROOT:
            # The engine makes it as root.
            await self._answer(container.put_archive("/", docker_bash.directory(WORKSPACE, 0o1777)))
        if carried:
            await self._answer(container.put_archive("/", carried[0]))
        await running.start()

    async def _create(self, engine: Engine, settings: dict[str, Any]) -> Any:
        if self._stopping is not None:
            raise SandboxError("The sandbox was stopped.")
        # Shielded, so that what was asked for is known when it is time to remove it.
        self._creating = asyncio.ensure_future(engine.client.containers.create(settings, name=self.name))
        return await asyncio.shield(self._creating)

    async def _connect(self, argv: Sequence[str], receiver: Receiver) -> Stream:
        engine = self._provider.engine
        assert engine is not None
        if argv:
            execution = await self._answer(
                engine.client.containers.container(self.name).exec(list(argv), stdin=True, stdout=True, stderr=True)
            )
            return await engine.address.stream(f"/exec/{execution.id}/start", b'{"Detach":false,"Tty":false}', receiver)
        attach = f"/containers/{self.name}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        stream = await engine.address.stream(attach, b"", receiver)
        try:
            await self._answer(engine.client.containers.container(self.name).start())
        except BaseException:
            stream.close()
            raise
        return stream

    async def _answer(self, asking: Any) -> Any:
        """What the engine answers. Raises `SandboxError` with what it says."""
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                return await asking
        except aiodocker.DockerError as error:
            if re.search(r"executable file|no such file", error.message):
                raise _NoBash(error.message) from error
            raise SandboxError(f"The container could not be started: {error.message}.") from error
        except aiohttp.ClientError as error:
            raise SandboxError(f"The container engine broke off: {error}.") from error
        except TimeoutError:
            raise SandboxError(f"The container engine did not answer within {ENGINE_SECONDS:g} s.") from None

    def _settings(self, image: Image, argv: list[str]) -> dict[str, Any]:
        """The body of "Create a container" of the Engine API."""
        spec, limits = self.spec, self.spec.limits
        own = {name: value for name, value in ENVIRONMENT.items() if name not in AS_THE_IMAGE_SAYS}
        variables = {**own, **image.variables, **spec.env}
        for name, value in spec.env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
                raise SandboxError(f"{name!r} cannot be a variable of the sandbox's shell.")
        host: dict[str, Any] = {
            "AutoRemove": True,
            "LogConfig": {"Type": "none"},
            "Tmpfs": {IO: f"rw,mode=1777,size={IO_BYTES}"},
        }
        if not spec.network:
            host["NetworkMode"] = "none"
        if limits.memory_mb:
            host |= {"Memory": limits.memory_mb << 20, "MemorySwap": limits.memory_mb << 20}
        if limits.cpus:
            host["NanoCpus"] = int(limits.cpus * 1e9)
        if limits.processes:
            host["PidsLimit"] = limits.processes
        if limits.disk_mb:
            host["StorageOpt"] = {"size": f"{limits.disk_mb}M"}
        return {
            "Image": image.id,
            "Entrypoint": argv,
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in variables.items()],
            "WorkingDir": self.workspace,
            "Healthcheck": {"Test": ["NONE"]},
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Labels": {
                docker_leftovers.RUN: spec.run_id,
                docker_leftovers.SESSION: spec.session_id,
                docker_leftovers.OWNER: self._provider.owner,
            },
            "HostConfig": host,
        }

    # End.

    async def _stop(self) -> None:
        try:
            if self._running is not None:
                self._running.stop()
            await self._remove()
        finally:
            await self._provider.leave(self)

    async def _remove(self) -> None:
        """Remove the container. Raises `SandboxError` where that cannot be done in time."""
        creating, engine = self._creating, self._provider.engine
        if creating is None or engine is None:
            return
        end = asyncio.get_running_loop().time() + REMOVE_SECONDS
        said = "its making has not ended"
        try:
            async with asyncio.timeout_at(end):
                await asyncio.wait((creating,))
                while True:
                    try:
                        await engine.client.containers.container(self.name).delete(force=True, v=True)
                        break
                    except (aiodocker.DockerError, aiohttp.ClientError) as error:
                        if getattr(error, "status", 0) == 404:
                            break
                        said = str(error)  # often that its removal is in progress
                    await asyncio.sleep(0.03)
        except TimeoutError:
            raise SandboxError(f"The container {self.name} could not be removed: {said}.") from None
        self._creating = None


class _NoBash(SandboxError):
    """The image has no bash."""


class Engine:
    """What the sandboxes of one worker share."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.images = Images(lambda: self.client)
        self.shells: dict[str, tuple[bytes, tuple[str, ...]]] = {}  # of images without bash, by their id
        self.abilities: dict[str, Any] | None = None  # what it says of itself, where that was asked
        self.starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._client: aiodocker.Docker | None = None

    @property
    def client(self) -> aiodocker.Docker:
        """Makes the ordinary calls."""
        if self._client is None:
            self._client = aiodocker.Docker(url=self.address.url, ssl_context=self.address.tls)
        return self._client

    async def rest(self) -> None:
        """Close connections until there is something to do again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class DockerSandboxes:
    """Makes the containers of one worker.

    Args:
        options: `DOCKER_HOST`, where the engine listens; without it the environment's, else the usual sockets.
    """

    capabilities = DockerSandbox.capabilities

    def __init__(self, *, options: Mapping[str, str] = {}) -> None:
        self._host = options.get("DOCKER_HOST", "")
        self.owner = docker_leftovers.owner()
        self.engine: Engine | None = None
        self._finding: asyncio.Future[Address] | None = None
        self._reaping: asyncio.Future[int] | None = None
        self._using: set[DockerSandbox] = set()
        self._made: weakref.WeakSet[DockerSandbox] = weakref.WeakSet()

    @staticmethod
    def problem(options: Mapping[str, str] = {}) -> str:
        """Why no container can be made here, with the mend; empty where an engine answers."""
        try:
            find(options.get("DOCKER_HOST", ""))
        except SandboxError as error:
            return str(error)
        return ""

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started."""
        sandbox = DockerSandbox(spec, self)
        self._made.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        for sandbox in self._made:
            sandbox.cleanup()
        if self.engine is not None:
            self.engine.images.give_up()
            with contextlib.suppress(OSError, SandboxError):
                docker_leftovers.remove_of(self.engine.address, self.owner)

    async def join(self, sandbox: DockerSandbox) -> Engine:
        """The engine, for a sandbox that begins. The first one also removes what dead workers of its run left."""
        if self.engine is None:
            if self._finding is None or self._finding.done():
                self._finding = asyncio.ensure_future(asyncio.to_thread(find, self._host))
            address = await asyncio.shield(self._finding)
            self.engine = self.engine or Engine(address)
        self._using.add(sandbox)
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(self._reap(sandbox.spec.run_id, self.engine.address))
        return self.engine

    async def leave(self, sandbox: DockerSandbox) -> None:
        """A sandbox has ended."""
        self._using.discard(sandbox)
        if not self._using and self.engine is not None and not self.engine.images.busy:
            await self.engine.rest()

    async def _reap(self, run_id: str, address: Address) -> int:
        with contextlib.suppress(OSError, SandboxError):
            return await asyncio.to_thread(docker_leftovers.reap, address, run_id)
        return 0
