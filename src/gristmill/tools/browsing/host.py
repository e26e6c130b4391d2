"""The one browser of a worker: started at the first need and after a crash, ended with everything it made."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence

from playwright.async_api import Browser, BrowserContext, Error, Playwright, async_playwright

from gristmill.tools.browsing import PageError
from gristmill.tools.browsing.chromium import Confinement, Lair, Running, confinements, launch
from gristmill.tools.browsing.proxy import Outlet, Proxy

ACTION_SECONDS = 10.0  # that an action waits for its element to become ready
CLOSE_SECONDS = 10.0
VIEWPORT_WIDTH, VIEWPORT_HEIGHT = 1280, 720  # CSS pixels

_log = logging.getLogger("gristmill.browser")


class BrowserHost:
    """Owner of the browser, its proxy and its directory.

    Args:
        executable: path of a Chromium.
        ways: how to confine it, the best first; by default what this machine may be able to do.
    """

    def __init__(self, executable: str, ways: Sequence[Confinement] = ()) -> None:
        self._executable = executable
        self._ways = tuple(ways) or confinements()
        self._lock = asyncio.Lock()
        # Opening is heavy; many at once only make each other late.
        self.turn = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self._unwanted: set[asyncio.Task[None]] = set()
        self._playwright: Playwright | None = None
        self._running: Running | None = None
        self._lair: Lair | None = None
        self._proxy = Proxy()
        self._gone = False
        self._closed = False

    @property
    def confinement(self) -> Confinement | None:
        """How the running browser is confined, None without one."""
        return self._running.confinement if self._running else None

    async def answers(self) -> bool:
        """Whether the browser lives; one that does not is started anew at the next `open`.

        Playwright tells of a browser that ended, but not of its own driver's end: then only calls fail.
        """
        running = self._running
        if running is not None and running.browser.is_connected():
            with contextlib.suppress(Error, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    session = await running.browser.new_browser_cdp_session()
                    await session.detach()
                return True
        if running is self._running:
            self._gone = True
        return False

    async def open(self, outlet: Outlet) -> BrowserContext:
        """A context of its own for one session, whose pages reach a network through `outlet` only.

        Raises `PageError` where the browser cannot be started, and Playwright's error where it fails.
        """
        try:
            context = await self._new_context(outlet)
        except Error:
            # A browser that died unnoticed: there is a new one to try.
            if await self.answers():
                raise
            context = await self._new_context(outlet)
        context.set_default_timeout(ACTION_SECONDS * 1000)
        return context

    async def _new_context(self, outlet: Outlet) -> BrowserContext:
        browser = await self._browser()
        server = await self._proxy.admit(outlet)
        opening = asyncio.ensure_future(
            browser.new_context(
                proxy={"server": server, "bypass": "<-loopback>"},
                viewport={"width": VIEWPORT_WIDTH, "height": VIEWPORT_HEIGHT},
                locale="en-US",
                accept_downloads=True,
            )
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The browser makes it all the same, and nobody else would close it.
            closing = asyncio.create_task(_close_when_open(opening))
            self._unwanted.add(closing)
            closing.add_done_callback(self._unwanted.discard)
            raise

    async def end(self, outlet: Outlet, context: BrowserContext | None) -> None:
        """Close a session's context and its connections; never raises for a browser that is gone."""
        await self._proxy.dismiss(outlet)
        if context is not None:
            await _quietly(context.close())

    async def close(self) -> None:
        """End the browser and remove its directory; idempotent."""
        self._closed = True
        async with self._lock:
            await self._stop()

    async def _browser(self) -> Browser:
        async with self._lock:
            if self._closed:
                raise PageError("The worker is ending.")
            if self._gone or self._running is None or not self._running.browser.is_connected():
                await self._stop()
                self._gone = False
                try:
                    await self._start()
                except BaseException:
                    await self._stop()
                    raise
            assert self._running is not None
            return self._running.browser

    async def _start(self) -> None:
        self._lair = Lair()
        self._playwright = await async_playwright().start()
        reasons: list[str] = []
        for number, way in enumerate(self._ways):
            try:
                self._running = await launch(self._playwright, self._executable, self._lair, way)
            except (Error, OSError) as error:
                reasons.append(f"{way}: {_first_lines(str(error))}")
                continue
            # What worked once is taken the next time, too.
            self._ways = self._ways[number:]
            await self._proxy.listen(self._running.listener)
            if reasons:
                _log.warning("the browser runs with %s only; %s", way, "; ".join(reasons))
            return
        raise PageError(f"Chromium ({self._executable}) does not start. {'; '.join(reasons)}")

    async def _stop(self) -> None:
        await self._proxy.close()
        if self._running is not None:
            await _quietly(self._running.browser.close())
            self._running = None
        if self._playwright is not None:
            await _quietly(self._playwright.stop())
            self._playwright = None
        if self._lair is not None:
            self._lair.remove()
            self._lair = None


async def _close_when_open(opening: asyncio.Future[BrowserContext]) -> None:
    with contextlib.suppress(Error):
        await _quietly((await opening).close())


async def _quietly(closing: object) -> None:
    """Await the end of something of the browser's for a bounded time; one that is gone already has ended.

    Playwright raises plain exceptions where its driver died, so every one means the same here.
    """
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_SECONDS):
            await closing  # type: ignore[misc]


def _first_lines(text: str) -> str:
    """The lines of a launch error that say something, in one."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("<launching>")]
    return " ".join(lines)[:600]
