"""Images of a container engine: looked for locally, then pulled, once per image however many sessions name it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp

from gristmill.errors import SandboxError

PULL_TRIES = 3
PULL_PAUSE = 1.0  # seconds before the second try, doubled for the third
STALL_SECONDS = 600.0  # without a word from a pull
PULLS_AT_ONCE = 3
AGAIN_SECONDS = 60.0  # until an image that could not be had is asked for again
HUB = "https://index.docker.io/v1/"  # how docker.io is called in config.json
# What engines and registries say of an image that a second try would not bring either.
_FINAL = re.compile(
    r"manifest unknown|name unknown|not found|denied|unauthorized|invalid reference|no matching manifest"
)


@dataclass(frozen=True)
class Image:
    """What an image says of itself."""

    id: str
    user: str = ""
    directory: str = ""  # its WORKDIR
    architecture: str = ""
    variables: dict[str, str] = field(default_factory=dict)


class Images:
    """The images that one worker uses."""

    def __init__(self, client: Callable[[], aiodocker.Docker]) -> None:
        self._client = client
        self._found: dict[str, tuple[float, asyncio.Task[Image]]] = {}
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)

    async def get(self, name: str) -> Image:
        """An image that is there to be used. Raises `SandboxError` with what the engine says."""
        began, task = self._found.get(name, (0.0, None))
        if task is None or (task.done() and _failed(task) and time.monotonic() - began > AGAIN_SECONDS):
            task = asyncio.ensure_future(self._fetch(name))
            self._found[name] = (time.monotonic(), task)
        # Shielded: a session that goes away must not end the pull that others wait for.
        return await asyncio.shield(task)

    @property
    def busy(self) -> bool:
        """Whether an image is being asked for."""
        return any(not task.done() for _, task in self._found.values())

    def give_up(self) -> None:
        """End all pulls."""
        for _, task in self._found.values():
            if not task.done() and not task.get_loop().is_closed():
                task.cancel()

    def forget(self, name: str) -> None:
        """Look for it anew the next time."""
        if (found := self._found.get(name)) and found[1].done() and not _failed(found[1]):
            del self._found[name]

    async def _fetch(self, name: str) -> Image:
        reference = name.removeprefix("docker://")
        if not re.fullmatch(r"[\w][\w./:@-]*", reference, re.ASCII) or ".." in reference:
            raise SandboxError(f"{name!r} cannot be the name of an image.")
        pulled = False
        try:
            found = await self._inspect(reference)
            if found is None:
                pulled = True
                async with self._pulls:
                    await self._pull(reference)
                found = await self._inspect(reference)
        except (aiodocker.DockerError, aiohttp.ClientError) as error:
            if not pulled:  # the engine's trouble, not the image's
                del self._found[name]
            said = getattr(error, "message", "") or repr(error)
            raise SandboxError(f"The image {name} cannot be had: {said}.") from error
        if found is None:
            raise SandboxError(f"The image {name} was pulled but is not there.")
        settings = found.get("Config") or {}
        return Image(
            id=found["Id"],
            user=settings.get("User") or "",
            directory=settings.get("WorkingDir") or "",
            architecture=found.get("Architecture") or "",
            variables=dict(entry.partition("=")[::2] for entry in settings.get("Env") or ()),
        )

    async def _inspect(self, reference: str) -> dict[str, Any] | None:
        try:
            return await self._client().images.inspect(reference)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return None
            raise

    async def _pull(self, reference: str) -> None:
        repository, tag, credentials = _parts(reference)
        pause = PULL_PAUSE
        for attempt in range(1, PULL_TRIES + 1):
            try:
                async with asyncio.timeout(STALL_SECONDS) as limit:
                    async for message in self._client().images.pull(repository, tag=tag, auth=credentials, stream=True):
                        if said := message.get("error"):
                            raise aiodocker.DockerError(500, said)
                        limit.reschedule(asyncio.get_running_loop().time() + STALL_SECONDS)
                return
            except TimeoutError:
                error = aiodocker.DockerError(504, f"no word from the pull for {STALL_SECONDS:g} s")
            except aiodocker.DockerError as failure:
                error = failure
            if attempt == PULL_TRIES or error.status < 500 or _FINAL.search(error.message):
                raise error
            await asyncio.sleep(pause)
            pause *= 2


def _failed(task: asyncio.Task[Image]) -> bool:
    return task.cancelled() or task.exception() is not None


def _parts(reference: str) -> tuple[str, str, dict[str, str] | None]:
    """Repository, tag or digest, and the credentials that `docker login` left for its registry."""
    repository, digest, tag = reference.partition("@")
    if not digest:
        path, colon, tag = reference.rpartition(":")
        repository, tag = (path, tag) if colon and "/" not in tag else (reference, "latest")
    host = repository.partition("/")[0]
    local = "/" not in repository or not re.search(r"[.:]|^localhost$", host)
    found: dict[str, str] | None = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        logins = json.loads((Path.home() / ".docker" / "config.json").read_text())["auths"]
        user, _, password = base64.b64decode(logins[HUB if local else host]["auth"]).decode().partition(":")
        found = {"username": user, "password": password}
    if found and local:
        # The client wants the registry named where it sends credentials.
        repository = f"docker.io/{repository if '/' in repository else f'library/{repository}'}"
    return repository, tag, found
