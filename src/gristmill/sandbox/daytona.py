"""`daytona`: a sandbox of Daytona's for every session, by its SDK; images of rows are pulled on Daytona's side.

Needs DAYTONA_API_KEY. The SDK has no stream that carries bytes both ways, so programs are reached by single commands
(`polled_stream`). Sandboxes are ephemeral and stop after 15 minutes without a call, and so cease to exist where their
worker died.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import posixpath
import re
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import daytona

from gristmill.errors import SandboxError
from gristmill.sandbox.apart import apart
from gristmill.sandbox.base import Capabilities, Sandbox, SandboxSpec
from gristmill.sandbox.inside import ENVIRONMENT, SCRIPTS, StreamInside, exports
from gristmill.sandbox.lanes import LaneSupervisor
from gristmill.sandbox.owner import is_dead, owner
from gristmill.sandbox.polled_stream import PolledStream
from gristmill.sandbox.stream import Receiver, Stream
from gristmill.sandbox.supervised import SupervisedSandbox

RUN, SESSION, OWNER = "gristmill-run", "gristmill-session", "gristmill-owner"  # labels
CREATE_SECONDS = 900.0  # for an image to be pulled, and a sandbox to start
PUT_SECONDS = 120
END_SECONDS = 9.0
IDLE_MINUTES = 15  # without a call until a sandbox stops, and with that is gone
PROBLEM_SECONDS = 20.0
AS_THE_IMAGE_SAYS = ("PATH", "SHELL", "SHLVL")
IO = "/tmp/.gristmill"
ERRORS = (daytona.DaytonaError, OSError, ValueError)


class DaytonaSandbox(SupervisedSandbox):
    """One sandbox of Daytona's."""

    capabilities = Capabilities(
        isolated=True, images=True, network_switch=True, limits=frozenset({"memory_mb", "disk_mb", "cpus"})
    )

    def __init__(self, spec: SandboxSpec, worker: DaytonaSandboxes) -> None:
        super().__init__(spec)
        self._worker = worker
        self._begun = False
        self._creating: asyncio.Task[Any] | None = None
        self._running: LaneSupervisor | None = None
        self._stopping: asyncio.Future[None] | None = None

    async def start(self) -> None:
        if self._begun or self._stopping is not None:
            raise SandboxError("A sandbox starts once.")
        self._begun = True
        if not self.spec.image:
            raise SandboxError("A sandbox needs an image.", "Give rows an `image`, or set TERMINAL_DAYTONA_IMAGE.")
        variables = exports(self.spec.env)
        parameters = self._parameters()
        client = self._worker.join(self)
        # Shielded, so that what was asked for is known when it is time to end it.
        self._creating = asyncio.ensure_future(client.create(parameters, timeout=CREATE_SECONDS))
        await _answer(asyncio.shield(self._creating), CREATE_SECONDS, "The sandbox could not be started")
        probe = (SCRIPTS / "probe.sh").read_text()
        said = (await self._run(probe, int(END_SECONDS))).strip()
        if not said.startswith("/"):
            raise SandboxError(f"The sandbox could not be started: {said or 'it has no directory that can be written'}")
        self.workspace = said
        own = exports({name: value for name, value in ENVIRONMENT.items() if name not in AS_THE_IMAGE_SAYS})
        cwd = posixpath.normpath(posixpath.join(self.workspace, self.spec.cwd))
        prelude = f"unset ${{!DAYTONA*}}\n{own}{variables}"
        inside = StreamInside(IO, self.workspace, cwd, prelude=prelude)
        running = self._running = LaneSupervisor(self._connect, inside, mortal=True)
        await running.start()

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    def cleanup(self) -> None:
        if self._running is not None:
            self._running.stop()
        box = self._box
        if box is not None:
            with contextlib.suppress(SandboxError, *ERRORS):
                apart(lambda: asyncio.run(_delete(box.id)), END_SECONDS)

    @property
    def _box(self) -> Any:
        """Daytona's sandbox; None where there is none, or not yet."""
        creating = self._creating
        if creating is None or not creating.done() or creating.cancelled() or creating.exception():
            return None
        return creating.result()

    def _parameters(self) -> Any:
        spec, limits = self.spec, self.spec.limits
        image = spec.image.removeprefix("docker://")
        # It becomes a line of a Dockerfile there.
        if not re.fullmatch(r"[\w][\w./:@-]*", image, re.ASCII):
            raise SandboxError(f"{spec.image!r} cannot be the name of an image.")
        resources = daytona.Resources(
            cpu=math.ceil(limits.cpus) or None,
            memory=math.ceil(limits.memory_mb / 1024) or None,
            disk=math.ceil(limits.disk_mb / 1024) or None,
        )
        return daytona.CreateSandboxFromImageParams(
            image=image,
            resources=resources,
            labels={RUN: spec.run_id, SESSION: spec.session_id, OWNER: owner()},
            network_block_all=not spec.network,
            auto_stop_interval=IDLE_MINUTES,
            ephemeral=True,
        )

    async def _run(self, command: str, seconds: int) -> str:
        """What a command prints. Raises `SandboxError`."""
        asking = self._box.process.exec(command, timeout=seconds)
        return str((await _answer(asking, seconds + 10, "The sandbox does not answer")).result)

    async def _put(self, path: str, data: bytes) -> None:
        asking = self._box.fs.upload_file(data, path, PUT_SECONDS)
        await _answer(asking, PUT_SECONDS + 10, "The sandbox takes no file")

    async def _connect(self, argv: Sequence[str], receiver: Receiver) -> Stream:
        assert self._running is not None
        return await PolledStream.open(self._run, self._put, argv or self._running.first_argv, receiver)

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
        if self._creating is not None:
            await asyncio.wait((self._creating,), timeout=END_SECONDS / 2)
            if not self._creating.done():
                # Daytona takes its time; whenever it is there, it goes.
                self._creating.add_done_callback(lambda _: asyncio.ensure_future(self._end()))
                raise SandboxError("The sandbox has not been made yet; it will be ended when it has.")
        await self._end()

    async def _end(self) -> None:
        try:
            box = self._box
            if box is not None:
                await _answer(box.delete(timeout=END_SECONDS / 2), END_SECONDS, "The sandbox could not be ended")
        finally:
            await self._worker.leave(self)


class DaytonaSandboxes:
    """Makes the sandboxes of one worker.

    Args:
        options: there are none for this kind; the SDK reads its own variables.
    """

    capabilities = DaytonaSandbox.capabilities

    def __init__(self, *, options: Mapping[str, str] = {}) -> None:
        self._client: Any = None
        self._using: set[DaytonaSandbox] = set()
        self._reaping: asyncio.Task[int] | None = None
        self._made: weakref.WeakSet[DaytonaSandbox] = weakref.WeakSet()

    @staticmethod
    def problem(options: Mapping[str, str] = {}) -> str:
        """Why no sandbox can be made, with the mend; empty where Daytona knows us."""
        try:
            apart(lambda: asyncio.run(_ask()), PROBLEM_SECONDS)
        except daytona.DaytonaAuthenticationError as error:
            return f"Daytona does not let us in: {error}"  # it says what to do
        except (SandboxError, *ERRORS) as error:
            return f"Daytona cannot be reached: {error}"
        return ""

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started."""
        sandbox = DaytonaSandbox(spec, self)
        self._made.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        for sandbox in self._made:
            sandbox.cleanup()

    def join(self, sandbox: DaytonaSandbox) -> Any:
        """The client, for a sandbox that begins. The first one also ends what dead workers of its run left."""
        if self._client is None:
            self._client = _client()
        self._using.add(sandbox)
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(_reap(self._client, {RUN: sandbox.spec.run_id}))
        return self._client

    async def leave(self, sandbox: DaytonaSandbox) -> None:
        """A sandbox has ended."""
        self._using.discard(sandbox)
        if not self._using and self._client is not None:
            client, self._client = self._client, None
            if self._reaping is not None:
                await asyncio.wait((self._reaping,), timeout=END_SECONDS / 4)
            with contextlib.suppress(*ERRORS):
                await client.close()


def reap() -> int:
    """End the sandboxes of dead workers of this user on this machine; how many. Raises `SandboxError`."""

    async def work() -> int:
        client = _client()
        try:
            return await _reap(client, {})
        finally:
            await client.close()

    try:
        return apart(lambda: asyncio.run(work()), CREATE_SECONDS)
    except ERRORS as error:
        raise SandboxError(f"Daytona cannot be asked: {error}") from error


def _client() -> Any:
    # Each stream has a call under way, so the number of connections must not be limited.
    return daytona.AsyncDaytona(daytona.DaytonaConfig(connection_pool_maxsize=None))


async def _ask() -> None:
    client = _client()
    try:
        async for _ in client.list(daytona.ListSandboxesQuery(limit=1)):
            break
    finally:
        await client.close()


async def _delete(identity: str) -> None:
    client = _client()
    try:
        with contextlib.suppress(daytona.DaytonaNotFoundError):
            await (await client.get(identity)).delete(timeout=END_SECONDS)
    finally:
        await client.close()


async def _reap(client: Any, labels: dict[str, str]) -> int:
    ended = 0
    with contextlib.suppress(*ERRORS):
        async for box in client.list(daytona.ListSandboxesQuery(labels=labels)):
            if is_dead(box.labels.get(OWNER, "")):
                await box.delete(timeout=END_SECONDS)
                ended += 1
    return ended


async def _answer(asking: Awaitable[Any], seconds: float, failure: str) -> Any:
    """What the SDK answers. Raises `SandboxError` with what it says."""
    try:
        async with asyncio.timeout(seconds):
            return await asking
    except TimeoutError:
        raise SandboxError(f"{failure}: Daytona did not answer within {seconds:g} s.") from None
    except ERRORS as error:
        raise SandboxError(f"{failure}: {str(error).strip() or type(error).__name__}.") from error
