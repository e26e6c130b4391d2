"""Images for Apptainer and SingularityCE: pulled once per host into a cache, whoever names them how often."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

from gristmill.errors import SandboxError
from gristmill.sandbox.singularity_program import Program

PULL_SECONDS = 3600.0  # for one image; making a file of its layers takes longer than fetching them
PULLS_AT_ONCE = 2
AGAIN_SECONDS = 60.0  # until an image that could not be had is asked for again
LOCK_PAUSE = 0.2  # seconds between looks at a lock that another worker holds


class Images:
    """The images that one worker uses."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._found: dict[str, tuple[float, asyncio.Task[str]]] = {}
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)

    async def get(self, name: str) -> str:
        """The path of an image that is there to be used. Raises `SandboxError` with what the program says."""
        began, task = self._found.get(name, (0.0, None))
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or (failed and time.monotonic() - began > AGAIN_SECONDS):
            task = asyncio.ensure_future(self._fetch(name))
            self._found[name] = (time.monotonic(), task)
        # Shielded: a session that goes away must not end the pull that others wait for.
        return await asyncio.shield(task)

    async def _fetch(self, name: str) -> str:
        if name.startswith(("/", "./", "~/")):
            local = Path(name).expanduser().absolute()
            if not local.exists():
                raise SandboxError(f"The image {name} does not exist.")
            return str(local)
        reference = name if "://" in name else f"docker://{name}"
        if not re.fullmatch(r"[a-z][a-z0-9-]*://[\w./:@-]+", reference, re.ASCII):
            raise SandboxError(f"{name!r} cannot be the name of an image.")
        cache, key = self._program.cache, hashlib.sha256(reference.encode()).hexdigest()[:32]
        image = cache / f"{key}.sif"
        if image.exists():
            return str(image)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            async with self._pulls, _locked(cache / f"{key}.lock"):
                if not image.exists():
                    await self._pull(name, reference, image)
        except OSError as error:
            raise SandboxError(f"The image {name} cannot be kept in {cache}: {error}.") from error
        return str(image)

    async def _pull(self, name: str, reference: str, image: Path) -> None:
        part = image.with_suffix(".part")
        part.unlink(missing_ok=True)  # of a worker that was killed
        try:
            code, said = await self._program.call("pull", str(part), reference, timeout=PULL_SECONDS)
            if code:
                said = said.rpartition("FATAL:")[2].strip() or f"status {code}"
                raise SandboxError(f"The image {name} cannot be had: {said}.")
            part.rename(image)
        finally:
            part.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold a lock that other processes heed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)
