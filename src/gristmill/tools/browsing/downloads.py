"""Files that pages hand out: from the browser's directory into the session's sandbox, and told with the next result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import Any

from playwright.async_api import Download, Error

from gristmill.errors import SandboxError
from gristmill.sandbox.base import Sandbox

DOWNLOAD_SECONDS = 120.0
DOWNLOAD_WAIT = 10.0  # seconds that an action's result waits for the downloads it started
DOWNLOAD_LIMIT = 100 * 2**20  # bytes of one file
FOLDER = "downloads"  # below the sandbox's workspace


class Downloads:
    """The downloads of one session."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._running: dict[asyncio.Task[None], str] = {}
        self._ended: list[dict[str, Any]] = []
        self._naming = asyncio.Lock()

    def take(self, download: Download) -> None:
        """Save a download that begins."""
        name = safe_name(download.suggested_filename)
        task = asyncio.create_task(self._save(download, name))
        self._running[task] = name
        task.add_done_callback(self._running.pop)

    async def settle(self) -> None:
        """Wait a while for those that run."""
        if self._running:
            await asyncio.wait(list(self._running), timeout=DOWNLOAD_WAIT)

    def news(self) -> dict[str, Any]:
        """Those that ended since the last call, and the names of those that run, as fields of a result."""
        found: dict[str, Any] = {}
        if self._ended:
            found["downloads"] = self._ended
            self._ended = []
        if self._running:
            found["downloading"] = list(self._running.values())
        return found

    async def close(self) -> None:
        """Give up those that run."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _save(self, download: Download, name: str) -> None:
        said: dict[str, Any] = {"file": name}
        try:
            async with asyncio.timeout(DOWNLOAD_SECONDS):
                path = Path(await download.path())
            size = path.stat().st_size
            if size > DOWNLOAD_LIMIT:
                said["error"] = f"{size} bytes are more than the {DOWNLOAD_LIMIT} of a download"
            else:
                said["path"] = await self._write(name, await asyncio.to_thread(path.read_bytes))
                said["bytes"] = size
        except TimeoutError:
            said["error"] = f"it took more than {DOWNLOAD_SECONDS:.0f} seconds"
            with contextlib.suppress(Error):
                await download.cancel()
        except Error as error:
            said["error"] = error.message
        except (SandboxError, OSError) as error:
            said["error"] = str(error)
        self._ended.append(said)
        with contextlib.suppress(Error):
            await download.delete()

    async def _write(self, name: str, data: bytes) -> str:
        """Write under a name that is free; the path inside the sandbox."""
        stem, suffix = os.path.splitext(name)  # noqa: PTH122
        async with self._naming:
            number = 1
            while True:
                path = f"{self._sandbox.workspace}/{FOLDER}/{stem}{f'-{number}' if number > 1 else ''}{suffix}"
                try:
                    await self._sandbox.read(path, 0)
                except FileNotFoundError:
                    await self._sandbox.write(path, data)
                    return path
                number += 1


def safe_name(suggested: str) -> str:
    """One plain path component out of what a server suggests."""
    name = re.sub(r"[^\w.()\[\] +,=@-]", "_", suggested.replace("\\", "/").rpartition("/")[2]).strip(". ")
    stem, suffix = os.path.splitext(name)  # noqa: PTH122
    return f"{stem[:100]}{suffix[:20]}" if name else "download"
