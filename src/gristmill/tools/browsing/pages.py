"""The pages of one session: which one is current, what happens on it unasked, and every action with an end in time.

What a page does on its own is answered at once and told with the next result: dialogs are accepted, pop-ups become the
current page, downloads go into the session's sandbox. A page or browser that crashed or hangs is given up with an error
that says so; the next navigation starts afresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from playwright.async_api import (
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Error,
    Frame,
    Locator,
    Page,
    Response,
)
from playwright.async_api import TimeoutError as TooSlow

from gristmill.sandbox.base import Sandbox
from gristmill.tools.browsing import PageError
from gristmill.tools.browsing.downloads import Downloads
from gristmill.tools.browsing.host import ACTION_SECONDS, BrowserHost
from gristmill.tools.browsing.proxy import REASON_HEADER, Outlet
from gristmill.tools.browsing.snapshot import Refs, render

NAVIGATE_SECONDS = 30.0
LOAD_SECONDS = 5.0  # that pictures and the like of a new page may take before it is shown without them
SETTLE_SECONDS = 3.0  # that requests which an action caused may take before its result is given
HANG_SECONDS = 15.0  # after which a page that does not answer is given up
PAGES_LIMIT = 10
NEWS_LIMIT = 20  # entries of one kind in one result
CONSOLE_LIMIT = 200  # messages kept
CONSOLE_FLOOD = 5_000  # messages of a page after which it is no longer listened to
TEXT_LIMIT = 1_000  # characters of a dialog's or console message's text

# Two frames' worth of time for the page to act on what was done to it; hidden pages draw none.
_TICK = "() => new Promise(done => { requestAnimationFrame(() => setTimeout(done)); setTimeout(done, 100); })"

# The call's name before an error, and the word that follows it where the fault is the element's, not a script's.
_CALL = re.compile(r"^(?:Locator\.\w+: (?:Error: )?|\w+\.\w+: )")
_HINDRANCE = re.compile("not (?:visible|enabled|stable|editable)|intercepts pointer|outside of the viewport")
_CLOSED = "has been closed"


class Pages:
    """One session's part of the worker's browser. Calls must not overlap; `close` may come at any time.

    Args:
        host: the worker's browser.
        sandbox: where downloads go, and what `localhost` means.
        allow_private: lifts the rule about addresses.
    """

    def __init__(self, host: BrowserHost, sandbox: Sandbox, *, allow_private: bool = False) -> None:
        self._host = host
        self.outlet = Outlet(sandbox, allow_private)
        self.console: deque[dict[str, str]] = deque(maxlen=CONSOLE_LIMIT)
        self.errors: deque[dict[str, str]] = deque(maxlen=CONSOLE_LIMIT)
        self._downloads = Downloads(sandbox)
        self._refs = Refs()
        self._context: BrowserContext | None = None
        self._pages: list[Page] = []  # the last one is current
        self._dialogs: deque[dict[str, str]] = deque(maxlen=NEWS_LIMIT)
        self._popups: deque[Page] = deque(maxlen=NEWS_LIMIT)
        self._lost = ""  # what happened to the page that was there
        self._navigated = False
        self._own = False  # the page that opens is asked for by us
        self._arriving = 0  # pop-ups that were opened and are not here yet
        self._arrived = asyncio.Event()
        self._chores: set[asyncio.Task[None]] = set()

    async def navigate(self, url: str) -> Response | None:
        """Load a page. None for an address that answered with a download. Raises `PageError`."""
        refusal = self.outlet.judge(url)
        if refusal:
            raise PageError(refusal)
        page = await self._ready()
        since = time.monotonic()
        self._arriving = 0
        self._arrived.set()
        response: Response | None = None
        async with self._bounded(NAVIGATE_SECONDS + HANG_SECONDS):
            try:
                response = await self._go(page, url)
            except TooSlow:
                raise PageError(f"{url} did not load within {NAVIGATE_SECONDS:.0f} seconds.") from None
            except Error as error:
                # Over https a refusal is only a failed tunnel to the browser; the outlet knows more.
                told = self.outlet.why_failed(url) if "ERR_TUNNEL_CONNECTION_FAILED" in error.message else ""
                if told:
                    raise PageError(told) from error
                if "Download is starting" not in error.message:
                    raise
            await self._check_answer(response)
            await self._settle(page, since, LOAD_SECONDS)
        return response

    async def _go(self, page: Page, url: str) -> Response | None:
        limits: dict[str, Any] = {"wait_until": "domcontentloaded", "timeout": NAVIGATE_SECONDS * 1000}
        try:
            return await page.goto(url, **limits)
        except Error as error:
            if "interrupted by another navigation" not in error.message:
                raise
            # The page was on its way elsewhere; what was asked for wins.
            return await page.goto(url, **limits)

    async def act(self, action: Callable[[Page], Awaitable[None]], seconds: float = ACTION_SECONDS) -> bool:
        """Do something to the current page; True where that led to another one. Raises `PageError`.

        An action that takes `seconds` ends with an error of its own; much later the page is given up.
        """
        page = self.current()
        self._navigated = False
        since = time.monotonic()
        self._arriving = 0
        self._arrived.set()
        async with self._bounded(seconds + SETTLE_SECONDS + HANG_SECONDS):
            try:
                await action(page)
            except TooSlow:
                async with asyncio.timeout(HANG_SECONDS):
                    await page.evaluate("1")  # only an element was not ready, or the page hangs?
                raise
            except Error as error:
                # Some actions close their page.
                if _CLOSED not in error.message or not page.is_closed() or not self._pages:
                    raise
            await self._settle(page, since, SETTLE_SECONDS)
        return self._navigated or page.is_closed() or bool(self._popups)

    async def back(self) -> None:
        """To the page before; from a pop-up without one to the page that opened it. Raises `PageError`."""

        async def go(page: Page) -> None:
            limits: dict[str, Any] = {"wait_until": "domcontentloaded", "timeout": NAVIGATE_SECONDS * 1000}
            await page.go_back(**limits)
            if self._navigated and page.url == "about:blank":  # the page that a tab begins with
                await page.go_forward(**limits)
                self._navigated = False
            if not self._navigated:
                if len(self._pages) < 2:
                    raise PageError("There is no earlier page.")
                await page.close()
                self._lost = ""

        await self.act(go, NAVIGATE_SECONDS)

    async def locate(self, ref: str) -> Locator:
        """The element with a ref of the last snapshot. Raises `PageError`."""
        page = self.current()
        try:
            name = self._refs.name(ref)
        except ValueError as error:
            raise PageError(str(error)) from None
        async with self._bounded(HANG_SECONDS):
            locator = page.locator(f"aria-ref={name}")
            if not await locator.count():
                raise PageError(f"{ref} is not on the page any more; call browser_snapshot for the refs of now.")
            return locator

    async def snapshot(self, *, full: bool = False) -> dict[str, Any]:
        """The current page as text, with the number of refs in it. Raises `PageError`."""
        page = self.current()
        async with self._bounded(HANG_SECONDS):
            try:
                tree = await page.aria_snapshot(mode="ai")
            except TooSlow:
                raise PageError(f"The page was too busy to be read within {ACTION_SECONDS:.0f} seconds.") from None
            text, refs = render(tree, self._refs, full=full)
        return {"snapshot": text or "(empty page)", "element_count": refs}

    async def place(self) -> dict[str, str]:
        """URL and title of the current page. Raises `PageError`."""
        page = self.current()
        async with self._bounded(HANG_SECONDS):
            return {"url": page.url, "title": await page.title()}

    async def ask(self, question: Callable[[Page], Awaitable[Any]]) -> Any:
        """What `question` finds out about the current page without changing it. Raises `PageError`."""
        page = self.current()
        async with self._bounded(HANG_SECONDS):
            return await question(page)

    def news(self) -> dict[str, Any]:
        """What happened on its own since the last call, as fields of a result; empty where nothing did."""
        found = self._downloads.news()
        if self._dialogs:
            found["dialogs"] = list(self._dialogs)
        if self._popups:
            found["popups"] = [{"url": page.url, "open": not page.is_closed()} for page in self._popups]
        if self._lost and self._pages:
            found["note"] = f"{self._lost} Another page that is open is the current one."
            self._lost = ""
        self._dialogs.clear()
        self._popups.clear()
        return found

    def current(self) -> Page:
        """The page that actions are about. Raises `PageError` where there is none."""
        if not self._pages:
            raise PageError(
                f"{self._lost} Call browser_navigate to open one again."
                if self._lost
                else "No page is open; call browser_navigate first."
            )
        return self._pages[-1]

    async def close(self) -> None:
        """End everything of this session; idempotent."""
        context, self._context = self._context, None
        self._pages.clear()
        await self._downloads.close()
        for chore in self._chores:
            chore.cancel()
        await self._host.end(self.outlet, context)

    async def _ready(self) -> Page:
        """The current page, or a new one where there is none."""
        if self._pages:
            return self._pages[-1]
        async with self._host.turn:
            if self._context is None:
                try:
                    self._context = await self._host.open(self.outlet)
                except Error as error:
                    raise PageError(f"The browser failed: {sentence(error)}") from error
                self._context.on("page", self._on_page)
                self._context.on("close", self._on_context_closed)
            self._own = True
            try:
                async with self._bounded(NAVIGATE_SECONDS):
                    page = await self._context.new_page()
            finally:
                self._own = False
        self._lost = ""
        return page

    async def _settle(self, page: Page, since: float, seconds: float) -> None:
        """Give the page time to act on what was done: for as long as it waits for answers, and at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._tick(page)
                await self.outlet.answered(since)
                await self._arrived.wait()
                if self._pages:
                    # A navigation may have begun only now, here or in a pop-up.
                    with contextlib.suppress(Error):
                        await self._pages[-1].wait_for_load_state("load", timeout=seconds * 1000)
                    await self._tick(self._pages[-1])
        await self._downloads.settle()

    async def _tick(self, page: Page) -> None:
        # A page that navigates or closes meanwhile has acted.
        with contextlib.suppress(Error):
            await page.evaluate(_TICK)

    async def _check_answer(self, response: Response | None) -> None:
        """Raise `PageError` for an answer that the proxy gave in the server's place."""
        if response is not None and REASON_HEADER in response.headers:
            raise PageError(await response.text())

    def _lost_or(self, text: str) -> str:
        return f"{self._lost} Call browser_navigate to open one again." if self._lost and not self._pages else text

    @contextlib.asynccontextmanager
    async def _bounded(self, seconds: float) -> AsyncIterator[None]:
        """Errors of the browser and of time as `PageError`; a page that hangs is given up."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            await self._give_up("The page did not answer any more and was closed.")
            raise PageError(self._lost_or("")) from None
        except Error as error:
            if _CLOSED in error.message and self._context is not None and not await self._host.answers():
                self._on_context_closed(self._context)
            raise PageError(self._lost_or(sentence(error))) from error

    async def _give_up(self, why: str) -> None:
        """Close the context: a page that hangs ends only with its process, which pages of a context share."""
        context, self._context = self._context, None
        self._pages.clear()
        self._lost = why
        await self._host.end(self.outlet, context)

    async def _watch_windows(self, page: Page) -> None:
        """Learn at once that a page opens another: Playwright tells only when that one has its first answer."""
        session = await page.context.new_cdp_session(page)

        def on_open(event: dict[str, Any]) -> None:
            self._arriving += 1
            self._arrived.clear()

        session.on("Page.windowOpen", on_open)
        await session.send("Page.enable")

    def _on_page(self, page: Page) -> None:
        self._arriving = max(0, self._arriving - 1)
        if not self._arriving:
            self._arrived.set()
        if len(self._pages) >= PAGES_LIMIT:
            self._chore(page.close())
            self._popups.append(page)
            return
        self._pages.append(page)
        if not self._own:
            self._popups.append(page)
        self._chore(self._watch_windows(page))
        heard = 0

        def on_console(message: ConsoleMessage) -> None:
            nonlocal heard
            heard += 1
            if heard == CONSOLE_FLOOD:
                page.remove_listener("console", on_console)
            source = message.location.get("url", "")
            self.console.append({"type": message.type, "text": message.text[:TEXT_LIMIT], "source": source})

        page.on("console", on_console)
        page.on("pageerror", lambda error: self.errors.append({"message": str(error)[:TEXT_LIMIT]}))
        page.on("dialog", self._on_dialog)
        page.on("download", self._downloads.take)
        page.on("framenavigated", self._on_navigated)
        page.on("crash", self._on_crash)
        page.on("close", self._on_closed)

    async def _on_dialog(self, dialog: Dialog) -> None:
        answer = dialog.default_value if dialog.type == "prompt" else ""
        said = {"type": dialog.type, "message": dialog.message[:TEXT_LIMIT], "answer": answer or "accepted"}
        self._dialogs.append(said)
        with contextlib.suppress(Error):
            await dialog.accept(answer)

    def _on_navigated(self, frame: Frame) -> None:
        self._navigated = self._navigated or frame.parent_frame is None

    def _on_crash(self, page: Page) -> None:
        self._lost = "The page crashed."
        self._on_closed(page)
        self._chore(page.close())

    def _on_closed(self, page: Page) -> None:
        if page in self._pages:
            self._pages.remove(page)
            self._lost = self._lost or "The page was closed."

    def _on_context_closed(self, context: BrowserContext) -> None:
        if context is self._context:
            self._context = None
            self._pages.clear()
            self._lost = "The browser crashed, and all its pages and cookies are gone."

    def _chore(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            with contextlib.suppress(Error):
                await work

        task = asyncio.create_task(run())
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


def sentence(error: Error) -> str:
    """What a model needs of Playwright's error: its first line without the call, and what it waited for."""
    head, _, log = error.message.partition("\nCall log:")
    text = _CALL.sub("", head)
    reasons = [line.strip(" -") for line in log.splitlines()]
    why = next((line for line in reversed(reasons) if _HINDRANCE.search(line)), "")
    first = " ".join(text.split("\n    at ")[0].split())[:TEXT_LIMIT]
    return f"{first} ({why[:300]})" if why else first
