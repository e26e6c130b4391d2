"""`modal`: a sandbox of Modal's for every session, by its SDK; images of rows are pulled and kept on Modal's side.

Needs the credentials that `modal token new` writes down, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET. The first process of
a sandbox ends it when no pulse has come for a while, so that a worker that died is not paid for until it is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import time
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import modal

from gristmill.errors import SandboxError
from gristmill.sandbox.apart import apart
from gristmill.sandbox.base import Capabilities, Sandbox, SandboxSpec
from gristmill.sandbox.inside import ENVIRONMENT, SCRIPTS, StreamInside, exports
from gristmill.sandbox.lanes import LaneSupervisor
from gristmill.sandbox.modal_stream import ERRORS, ModalStream
from gristmill.sandbox.owner import is_dead, owner
from gristmill.sandbox.stream import Receiver, Stream
from gristmill.sandbox.supervised import SupervisedSandbox

APP = "gristmill"  # the app of all our sandboxes
RUN, SESSION, OWNER = "gristmill-run", "gristmill-session", "gristmill-owner"  # tags
LIFE_SECONDS = 24 * 3600  # the longest that Modal lets a sandbox live
BUILD_SECONDS = 1800.0  # for an image to be pulled on Modal's side
CREATE_SECONDS = 600.0  # for a sandbox to be scheduled and to start
END_SECONDS = 9.0
AGAIN_SECONDS = 60.0  # until an image that could not be had is asked for again
PULSE_SECONDS = 240.0
# Ends after 15 minutes without a pulse, and of nothing that commands send it.
PULSES = """trap '' HUP INT QUIT TERM USR1 USR2 PIPE
while SECONDS=0; IFS= read -rt 900 _ || (($? > 128 && SECONDS < 900)); do :; done"""
PROBLEM_SECONDS = 20.0
AS_THE_IMAGE_SAYS = ("PATH", "SHELL", "SHLVL")
IO = "/tmp/.gristmill"


class ModalSandbox(SupervisedSandbox):
    """One sandbox of Modal's."""

    capabilities = Capabilities(
        isolated=True, images=True, network_switch=True, limits=frozenset({"memory_mb", "cpus"})
    )

    def __init__(self, spec: SandboxSpec, worker: ModalSandboxes) -> None:
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
            raise SandboxError("A sandbox needs an image.", "Give rows an `image`, or set TERMINAL_MODAL_IMAGE.")
        variables = exports(self.spec.env)
        app = await self._worker.app(self.spec.run_id)
        image = await self._worker.image(self.spec.image, app)
        # Shielded, so that what was asked for is known when it is time to end it.
        self._creating = asyncio.ensure_future(self._create(app, image))
        box = await _answer(asyncio.shield(self._creating), CREATE_SECONDS, "The sandbox could not be started")
        self._worker.pulse(box)
        self.workspace = await _answer(self._probe(box), CREATE_SECONDS, "The sandbox could not be started")
        own = exports({name: value for name, value in ENVIRONMENT.items() if name not in AS_THE_IMAGE_SAYS})
        cwd = posixpath.normpath(posixpath.join(self.workspace, self.spec.cwd))
        inside = StreamInside(IO, self.workspace, cwd, prelude=own + variables)
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
                apart(box.terminate, END_SECONDS)

    @property
    def _box(self) -> Any:
        """Modal's sandbox; None where there is none, or not yet."""
        creating = self._creating
        if creating is None or not creating.done() or creating.cancelled() or creating.exception():
            return None
        return creating.result()

    async def _create(self, app: Any, image: Any) -> Any:
        spec, limits = self.spec, self.spec.limits
        bounds: dict[str, Any] = {}
        if limits.cpus:
            bounds["cpu"] = (limits.cpus, limits.cpus)
        if limits.memory_mb:
            bounds["memory"] = (limits.memory_mb, limits.memory_mb)
        tags = {RUN: _tag(spec.run_id), SESSION: _tag(spec.session_id), OWNER: owner()}
        return await modal.Sandbox.create.aio(
            *("bash", "-c", PULSES),
            app=app,
            image=image,
            timeout=LIFE_SECONDS,
            block_network=not spec.network,
            tags=tags,
            **bounds,
        )

    async def _probe(self, box: Any) -> str:
        process = await box.exec.aio("sh", "-c", (SCRIPTS / "probe.sh").read_text(), text=False)
        found, said = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
        directory = found.decode("utf-8", "replace").strip()
        if not directory.startswith("/"):
            raise SandboxError(said.decode(errors="replace").strip() or "It has no directory that can be written.")
        return str(directory)

    async def _connect(self, argv: Sequence[str], receiver: Receiver) -> Stream:
        assert self._running is not None
        command = argv or self._running.first_argv
        starting = self._box.exec.aio(*command, text=False)
        process = await _answer(starting, CREATE_SECONDS, "A program could not be started in the sandbox")
        return ModalStream(process, receiver)

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
        if self._creating is None:
            return
        await asyncio.wait((self._creating,), timeout=END_SECONDS / 2)
        if not self._creating.done():
            # Modal takes its time; whenever it is there, it goes.
            self._creating.add_done_callback(lambda _: asyncio.ensure_future(self._end()))
            raise SandboxError("The sandbox has not been made yet; it will be ended when it has.")
        await self._end()

    async def _end(self) -> None:
        box = self._box
        if box is not None:
            self._worker.rest(box)
            await _answer(box.terminate.aio(), END_SECONDS / 2, "The sandbox could not be ended")
            with contextlib.suppress(*ERRORS):
                await box.detach.aio()


class ModalSandboxes:
    """Makes the sandboxes of one worker.

    Args:
        options: there are none for this kind; the SDK reads its own variables and configuration.
    """

    capabilities = ModalSandbox.capabilities

    def __init__(self, *, options: Mapping[str, str] = {}) -> None:
        self._app: asyncio.Task[Any] | None = None
        self._images: dict[str, tuple[float, asyncio.Task[Any]]] = {}
        self._boxes: set[Any] = set()  # that live, and get a pulse
        self._pulsing: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[int] | None = None
        self._made: weakref.WeakSet[ModalSandbox] = weakref.WeakSet()

    @staticmethod
    def problem(options: Mapping[str, str] = {}) -> str:
        """Why no sandbox can be made, with the mend; empty where Modal knows us."""
        try:
            apart(lambda: modal.Client.from_env().hello(), PROBLEM_SECONDS)
        except modal.exception.AuthError as error:
            return f"Modal does not let us in: {error}"  # it says what to do
        except (SandboxError, *ERRORS) as error:
            return f"Modal cannot be reached: {error}"
        return ""

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started."""
        sandbox = ModalSandbox(spec, self)
        self._made.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        for sandbox in self._made:
            sandbox.cleanup()

    async def app(self, run_id: str) -> Any:
        """The app; the first one to ask also ends what dead workers of its run left. Raises `SandboxError`."""
        if self._app is None or (self._app.done() and (self._app.cancelled() or self._app.exception())):
            self._app = asyncio.ensure_future(modal.App.lookup.aio(APP, create_if_missing=True))
        app = await _answer(asyncio.shield(self._app), CREATE_SECONDS, "Modal has no app for us")
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(_reap(app, {RUN: _tag(run_id)}))
        return app

    async def image(self, name: str, app: Any) -> Any:
        """An image that Modal has, pulled once however many sessions name it. Raises `SandboxError`."""
        began, task = self._images.get(name, (0.0, None))
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or (failed and time.monotonic() - began > AGAIN_SECONDS):
            reference = name.removeprefix("docker://")
            if not re.fullmatch(r"[\w][\w./:@-]*", reference, re.ASCII):
                raise SandboxError(f"{name!r} cannot be the name of an image.")
            task = asyncio.ensure_future(modal.Image.from_registry(reference).build.aio(app))
            self._images[name] = (time.monotonic(), task)
        return await _answer(asyncio.shield(task), BUILD_SECONDS, f"The image {name} cannot be had")

    def pulse(self, box: Any) -> None:
        """Keep it alive from now on."""
        self._boxes.add(box)
        if self._pulsing is None or self._pulsing.done():
            self._pulsing = asyncio.ensure_future(self._pulse())

    def rest(self, box: Any) -> None:
        """It needs to live no longer."""
        self._boxes.discard(box)
        if not self._boxes and self._pulsing is not None:
            self._pulsing.cancel()

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            for box in tuple(self._boxes):
                with contextlib.suppress(*ERRORS):
                    box.stdin.write(b"\n")
                    await box.stdin.drain.aio()


def reap() -> int:
    """End the sandboxes of dead workers of this user on this machine; how many. Raises `SandboxError`."""

    async def work() -> int:
        return await _reap(await modal.App.lookup.aio(APP, create_if_missing=True), {})

    try:
        return apart(lambda: asyncio.run(work()), CREATE_SECONDS)
    except ERRORS as error:
        raise SandboxError(f"Modal cannot be asked: {error}") from error


async def _reap(app: Any, tags: dict[str, str]) -> int:
    ended = 0
    with contextlib.suppress(*ERRORS):
        async for box in modal.Sandbox.list.aio(app_id=app.app_id, tags=tags):
            if is_dead((await box.get_tags.aio()).get(OWNER, "")):
                await box.terminate.aio()
                ended += 1
    return ended


async def _answer(asking: Awaitable[Any], seconds: float, failure: str) -> Any:
    """What the SDK answers. Raises `SandboxError` with what it says."""
    try:
        async with asyncio.timeout(seconds):
            return await asking
    except TimeoutError:
        raise SandboxError(f"{failure}: Modal did not answer within {seconds:g} s.") from None
    except ERRORS as error:
        raise SandboxError(f"{failure}: {str(error).strip() or type(error).__name__}.") from error


def _tag(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[-50:]
