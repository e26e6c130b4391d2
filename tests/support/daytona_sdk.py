"""A stand-in for Daytona's SDK: exactly what gristmill calls of it, on this machine. Not Daytona.

Each call is bound to the signature of the real SDK's function, so that what the real one would refuse fails here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import daytona
from daytona._async.filesystem import AsyncFileSystem
from daytona._async.process import AsyncProcess

from support.namespaces import Place, entering

MOST_BYTES = 128 << 10  # of one argument of a command, on Linux


def fits(real: Any, *args: Any, **given: Any) -> None:
    inspect.signature(real).bind(None, *args, **given)


class Box:
    """A sandbox; also its `process` and its `fs`."""

    def __init__(self, sdk: Sdk, given: Any) -> None:
        self.id = secrets.token_hex(8)
        self.given = given
        self.labels: dict[str, str] = given.labels
        self.commands = 0
        self._sdk = sdk
        root = sdk.root / self.id
        (root / "workspace").mkdir(parents=True)
        (root / "home").mkdir()
        (root / "tmp").mkdir()
        binds = {"/workspace": f"{root}/workspace", "/home/agent": f"{root}/home", "/tmp": f"{root}/tmp"}
        self._temporary = root / "tmp"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._place = Place(root / "etc", binds, alone=given.network_block_all)
        self.process = self.fs = self

    async def exec(self, command: str, *, timeout: int) -> Any:
        """Its output, both streams in one, as text."""
        fits(AsyncProcess.exec, command, timeout=timeout)
        assert isinstance(timeout, int) and len(command) < MOST_BYTES
        self._sdk.fail()
        self.commands += 1
        if self._place.process.poll() is not None:
            raise daytona.DaytonaNotFoundError(f"Failed to execute command: sandbox {self.id} not found")
        variables = {"HOME": "/home/agent", "DAYTONA_SANDBOX_ID": self.id}
        argv = entering(self._place.pid, self._place.alone, variables, ["sh", "-c", command])
        with tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
            # A call that is given up goes on there.
            self._processes.append(process)
            end = time.monotonic() + timeout
            while process.poll() is None:
                await asyncio.sleep(0.003)
                if time.monotonic() > end:
                    raise daytona.DaytonaTimeoutError("Failed to execute command: command execution timeout")
            self._processes.remove(process)
            printed.seek(0)
            output = printed.read()
        return SimpleNamespace(exit_code=process.returncode, result=output.decode(errors="replace"))

    async def upload_file(self, src: bytes, dst: str, timeout: int) -> None:
        fits(AsyncFileSystem.upload_file, src, dst, timeout)
        assert isinstance(src, bytes) and dst.startswith("/tmp/")
        self._sdk.fail()
        (self._temporary / dst.removeprefix("/tmp/")).write_bytes(src)

    async def delete(self, *, timeout: float) -> None:
        fits(daytona.AsyncSandbox.delete, timeout=timeout)
        self.end()

    def end(self) -> None:
        self._place.end()
        for process in self._processes:
            process.wait()
        self._sdk.boxes.discard(self)


class Client:
    """`AsyncDaytona`."""

    def __init__(self, sdk: Sdk, config: daytona.DaytonaConfig) -> None:
        fits(daytona.AsyncDaytona.__init__, config)
        assert config.connection_pool_maxsize is None
        self._sdk = sdk
        sdk.fail()
        sdk.clients += 1

    async def create(self, params: daytona.CreateSandboxFromImageParams, *, timeout: float) -> Box:
        fits(daytona.AsyncDaytona.create, params, timeout=timeout)
        assert isinstance(params, daytona.CreateSandboxFromImageParams)
        assert params.ephemeral and params.auto_delete_interval == 0 and params.auto_stop_interval == 15
        self._sdk.fail()
        await asyncio.sleep(self._sdk.delay)
        if str(params.image).startswith("missing"):
            raise daytona.DaytonaError("Failed to create sandbox: build failed: manifest unknown")
        box = Box(self._sdk, params)
        self._sdk.boxes.add(box)
        return box

    async def get(self, sandbox_id_or_name: str) -> Box:
        fits(daytona.AsyncDaytona.get, sandbox_id_or_name)
        for box in self._sdk.boxes:
            if box.id == sandbox_id_or_name:
                return box
        raise daytona.DaytonaNotFoundError("Failed to get sandbox: not found")

    async def list(self, query: daytona.ListSandboxesQuery) -> AsyncIterator[Box]:
        fits(daytona.AsyncDaytona.list, query)
        self._sdk.fail()
        for box in list(self._sdk.boxes):
            if (query.labels or {}).items() <= box.labels.items():
                yield box

    async def close(self) -> None:
        self._sdk.clients -= 1


class Sdk:
    """The module; what it only holds is the real one's. `boxes` are the sandboxes that live."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.boxes: set[Box] = set()
        self.clients = 0  # that are open
        self.error: Exception | None = None  # of whatever is asked next
        self.delay = 0.0  # seconds until a sandbox is there

    def AsyncDaytona(self, config: daytona.DaytonaConfig) -> Client:
        return Client(self, config)

    def __getattr__(self, name: str) -> Any:
        return getattr(daytona, name)

    def fail(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def end(self) -> None:
        """End what still lives."""
        for box in list(self.boxes):
            with contextlib.suppress(OSError):
                box.end()
