"""A stand-in for Modal's SDK: exactly what gristmill calls of it, on this machine. Not Modal.

Each call is bound to the signature of the real SDK's function, so that what the real one would refuse fails here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

import modal
import modal.container_process
import modal.io_streams
from modal import exception

from support.namespaces import Place, entering

MOST_BYTES = 16 << 20  # that the SDK takes until `drain`


class Both:
    """A function as the SDK has them: called it blocks, `aio` is the coroutine function."""

    def __init__(self, real: Any, run: Callable[..., Any], *, method: bool = True) -> None:
        self._signature = inspect.signature(real)
        self._receiver = (None,) if method else ()
        self._run = run

    def __call__(self, *args: Any, **given: Any) -> Any:
        self._signature.bind(*self._receiver, *args, **given)
        return asyncio.run(self._run(*args, **given))

    def aio(self, *args: Any, **given: Any) -> Any:
        self._signature.bind(*self._receiver, *args, **given)
        return self._run(*args, **given)


async def when(watch: Callable[..., Any], forget: Callable[..., Any], descriptor: int) -> None:
    """Until something can be done with a descriptor."""
    ready = asyncio.get_running_loop().create_future()
    watch(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        forget(descriptor)


class Writer:
    """stdin of a program."""

    def __init__(self, stdin: IO[bytes]) -> None:
        self._stdin = stdin
        self._waiting = bytearray()
        self._ending = False
        self.drain = Both(modal.io_streams.StreamWriter.drain, self._drain)

    def write(self, data: bytes) -> None:
        inspect.signature(modal.io_streams.StreamWriter.write).bind(self, data)
        if self._ending:
            raise ValueError("Stdin is closed. Cannot write to it.")
        if len(self._waiting) + len(data) > MOST_BYTES:
            raise BufferError("Buffer size exceed limit. Call drain to flush the buffer.")
        self._waiting += data

    def write_eof(self) -> None:
        self._ending = True

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                try:
                    del self._waiting[: os.write(self._stdin.fileno(), self._waiting[:65536])]
                except BlockingIOError:
                    await when(loop.add_writer, loop.remove_writer, self._stdin.fileno())
        except BrokenPipeError:
            raise exception.NotFoundError("exec has ended") from None
        if self._ending:
            self._stdin.close()


class Reader:
    """stdout or stderr of a program."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self.read = Both(modal.io_streams.StreamReader.read, self._read)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                piece = os.read(self._output.fileno(), 1 << 16)
            except BlockingIOError:
                await when(loop.add_reader, loop.remove_reader, self._output.fileno())
                continue
            if not piece:
                return
            yield piece

    async def _read(self) -> bytes:
        return b"".join([piece async for piece in self])


class Process:
    def __init__(self, argv: list[str]) -> None:
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        assert pipes[0] and pipes[1] and pipes[2]
        for pipe in pipes:
            os.set_blocking(pipe.fileno(), False)
        self.stdin, self.stdout, self.stderr = Writer(pipes[0]), Reader(pipes[1]), Reader(pipes[2])
        self.wait = Both(modal.container_process.ContainerProcess.wait, self._wait)
        real = modal.container_process.ContainerProcess
        assert all(isinstance(getattr(real, name), property) for name in ("stdin", "stdout", "stderr"))

    async def _wait(self) -> int:
        while self._process.poll() is None:
            await asyncio.sleep(0.01)
        return self._process.returncode


class Image:
    def __init__(self, name: str, sdk: Sdk) -> None:
        self.name = name
        self._sdk = sdk
        self.build = Both(modal.Image.build, self._build)

    async def _build(self, app: App) -> Image:
        self._sdk.builds.append(self.name)
        await asyncio.sleep(0.05)
        if self.name.startswith("missing"):
            raise exception.RemoteError(f"Image build for {self.name} failed: manifest unknown")
        return self


class App:
    def __init__(self, name: str) -> None:
        assert isinstance(modal.App.app_id, property)
        self.app_id = f"ap-{name}"


class Box:
    """A sandbox."""

    def __init__(self, sdk: Sdk, arguments: tuple[str, ...], given: dict[str, Any]) -> None:
        self.given = given
        self.pulses = 0
        self._sdk = sdk
        self._tags = dict(given["tags"])
        root = sdk.root / secrets.token_hex(4)
        (root / "workspace").mkdir(parents=True)
        (root / "home").mkdir()
        binds = {"/workspace": f"{root}/workspace", "/home/agent": f"{root}/home"}
        self._place = Place(root / "etc", binds, alone=given["block_network"], first=arguments, stdin=-1)
        self.exec = Both(modal.Sandbox.exec, self._exec)
        self.terminate = Both(modal.Sandbox.terminate, self._terminate)
        self.get_tags = Both(modal.Sandbox.get_tags, self._get_tags)
        self.detach = Both(modal.Sandbox.detach, self._detach)
        assert isinstance(modal.Sandbox.stdin, property)
        self.stdin = self
        self.drain = Both(modal.io_streams.StreamWriter.drain, self._pulse)

    @property
    def ended(self) -> bool:
        return self._place.process.poll() is not None

    def write(self, data: bytes) -> None:
        assert self._place.process.stdin is not None
        self._place.process.stdin.write(data)

    async def _pulse(self) -> None:
        assert self._place.process.stdin is not None
        self._place.process.stdin.flush()
        self.pulses += 1

    async def _exec(self, *argv: str, text: bool = True) -> Process:
        assert text is False
        if self.ended:
            raise exception.NotFoundError(f"Sandbox has already finished with status {self._place.process.poll()}")
        variables = {"HOME": "/home/agent", "MODAL_SANDBOX_ID": "sb-1"}
        command = entering(self._place.pid, self._place.alone, variables, list(argv))
        return Process(command)

    async def _terminate(self) -> None:
        self._place.end()
        self._sdk.boxes.discard(self)

    async def _get_tags(self) -> dict[str, str]:
        return self._tags

    async def _detach(self) -> None:
        assert self.ended


class Client:
    def __init__(self, sdk: Sdk) -> None:
        self.hello = Both(modal.Client.hello, sdk.hello)


class Sdk:
    """The module. `boxes` are the sandboxes that live, `builds` the images that were asked for."""

    exception = exception

    def __init__(self, root: Path) -> None:
        self.root = root
        self.boxes: set[Box] = set()
        self.builds: list[str] = []
        self.error: Exception | None = None  # of whatever is asked next
        self.delay = 0.0  # seconds until a sandbox is there
        self.App = self._Names(lookup=Both(modal.App.lookup, self._lookup, method=False))
        self.Image = self._Names(from_registry=self._from_registry)
        self.Sandbox = self._Names(
            create=Both(modal.Sandbox.create, self._create, method=False),
            list=Both(modal.Sandbox.list, self._list, method=False),
        )
        self.Client = self._Names(from_env=lambda: Client(self))

    class _Names:
        def __init__(self, **names: Any) -> None:
            vars(self).update(names)

    def _fail(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    async def hello(self) -> None:
        self._fail()

    async def _lookup(self, name: str, *, create_if_missing: bool) -> App:
        self._fail()
        assert create_if_missing
        return App(name)

    def _from_registry(self, tag: str) -> Image:
        inspect.signature(modal.Image.from_registry).bind(tag)
        return Image(tag, self)

    async def _create(self, *arguments: str, **given: Any) -> Box:
        self._fail()
        assert given["app"].app_id == "ap-gristmill" and 0 < given["timeout"] <= 24 * 3600
        for name, value in given["tags"].items():
            assert name.replace("-", "").isalnum() and len(value) <= 63
            assert value.replace("-", "").replace(".", "").replace("_", "").isalnum()
        await asyncio.sleep(self.delay)
        box = Box(self, arguments, given)
        if given["image"].name.startswith("no-bash"):
            box._place.end()  # as there is no such program
        self.boxes.add(box)
        return box

    async def _list(self, *, app_id: str, tags: dict[str, str]) -> AsyncIterator[Box]:
        assert app_id == "ap-gristmill"
        for box in list(self.boxes):
            if tags.items() <= box.given["tags"].items():
                yield box

    def end(self) -> None:
        """End what still lives."""
        for box in list(self.boxes):
            with contextlib.suppress(OSError):
                box.terminate()
