"""The browser toolset: ten tools that drive Chromium, one browser per worker and one private context per session.

Results have the reference's shapes: `{"success": true, …}`, or `{"success": false, "error": …}`. What a page did on its
own (dialogs, pop-ups, downloads) stands in the result of the call after it.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson

from gristmill.errors import ModelError
from gristmill.tools.base import Access, Tool, ToolContext, ToolOutput, Toolset
from gristmill.tools.browsing import PageError
from gristmill.tools.browsing.chromium import find_executable, missing
from gristmill.types import ToolSchema

if TYPE_CHECKING:
    from playwright.async_api import Page

    from gristmill.tools.browsing.pages import Pages

UPLOAD_LIMIT = 50 * 2**20  # bytes of a file that is typed into a file field
IMAGES_LIMIT = 100
RESULT_LIMIT = 20_000  # bytes of a console expression's result

_PAGE = Access(("browser",), writes=True)
_SCROLL = """sign => {
  const middle = document.elementFromPoint(innerWidth / 2, innerHeight / 2);
  const root = document.scrollingElement || document.documentElement;
  let box = middle;
  while (box && !(box.scrollHeight > box.clientHeight + 1 && /auto|scroll/.test(getComputedStyle(box).overflowY)))
    box = box.parentElement;
  if (!box || root.scrollHeight > root.clientHeight + 1) box = root;
  box.scrollBy({top: sign * Math.round(box.clientHeight * 0.8), behavior: 'instant'});
  return {top: Math.round(box.scrollTop), visible: box.clientHeight, height: box.scrollHeight};
}"""
_IMAGES = """limit => [...document.images].slice(0, limit).map(image => ({
  src: image.currentSrc || image.src, alt: image.alt, width: image.naturalWidth, height: image.naturalHeight}))"""

Do = Callable[["Pages", ToolContext, dict[str, Any]], Awaitable[dict[str, Any]]]


def _pages(context: ToolContext) -> Pages:
    """This session's pages; made, together with the worker's browser, at the first call."""
    # Playwright is an optional SDK: loaded only here, by the first call that needs it.
    from gristmill.tools.browsing.host import BrowserHost
    from gristmill.tools.browsing.pages import Pages

    pages = context.state.get("browser")
    if pages is None:
        host = context.shared.get("browser")
        if host is None:
            host = BrowserHost(find_executable(context.settings))
            context.shared["browser"] = host
            context.shared_closers.append(host.close)
        pages = Pages(host, context.sandbox, allow_private=context.allow_private_urls)
        context.state["browser"] = pages
        context.closers.append(pages.close)
    assert isinstance(pages, Pages)
    return pages


def _run(do: Do) -> Callable[[ToolContext, dict[str, Any]], Awaitable[ToolOutput]]:
    async def run(context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        pages = _pages(context)
        try:
            result = {"success": True, **await do(pages, context, arguments)}
        except PageError as error:
            result = {"success": False, "error": str(error)}
        return result | pages.news()

    return run


async def _navigate(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    response = await pages.navigate(arguments["url"].strip())
    status = {"status": response.status} if response is not None and response.status >= 400 else {}
    return await pages.place() | status | await pages.snapshot()


async def _snapshot(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    return await pages.place() | await pages.snapshot(full=arguments.get("full", False))


async def _click(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    element = await pages.locate(arguments["ref"])

    async def click(page: Page) -> None:
        await element.click()

    moved = await pages.act(click)
    return {"clicked": arguments["ref"]} | await _after(pages, moved)


async def _type(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    element = await pages.locate(arguments["ref"])
    text = arguments["text"]

    async def enter(page: Page) -> None:
        kind = await element.evaluate("e => e.tagName === 'INPUT' ? e.type : e.tagName.toLowerCase()")
        if kind == "select":
            await element.select_option(text)
        elif kind == "file":
            await element.set_input_files(await _upload(context, text))
        else:
            await element.fill(text)

    moved = await pages.act(enter)
    return {"typed": text, "element": arguments["ref"]} | await _after(pages, moved)


async def _upload(context: ToolContext, path: str) -> Any:
    try:
        data = await context.sandbox.read(path, UPLOAD_LIMIT + 1)
    except OSError as error:
        raise PageError(f"This field takes the path of a file in the workspace; {path}: {error}") from None
    if len(data) > UPLOAD_LIMIT:
        raise PageError(f"{path} is larger than the {UPLOAD_LIMIT} bytes of an upload.")
    return {"name": path.rpartition("/")[2], "mimeType": "application/octet-stream", "buffer": data}


async def _scroll(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    direction = arguments["direction"]
    where: dict[str, int] = {}

    async def scroll(page: Page) -> None:
        where.update(await page.evaluate(_SCROLL, -1 if direction == "up" else 1))

    await pages.act(scroll)
    return {"scrolled": direction, "position": where}


async def _back(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    await pages.back()
    return await pages.place() | await pages.snapshot()


async def _press(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    key = arguments["key"]

    async def press(page: Page) -> None:
        await page.keyboard.press(key)

    moved = await pages.act(press)
    return {"pressed": key} | await _after(pages, moved)


async def _get_images(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    async def look(page: Page) -> Any:
        return await page.evaluate(_IMAGES, IMAGES_LIMIT)

    images = await pages.ask(look)
    for image in images:
        if image["src"].startswith("data:") and len(image["src"]) > 100:
            image["src"] = f"{image['src'][:80]}… ({len(image['src'])} characters)"
    return {"images": images, "count": len(images)}


async def _console(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    expression = arguments.get("expression", "")
    if expression:
        result = await _evaluate(pages, expression)
        return {"result": result, "result_type": type(result).__name__}
    messages, errors = list(pages.console), list(pages.errors)
    if arguments.get("clear", False):
        pages.console.clear()
        pages.errors.clear()
    return {
        "console_messages": messages,
        "js_errors": errors,
        "total_messages": len(messages),
        "total_errors": len(errors),
    }


async def _evaluate(pages: Pages, expression: str) -> Any:
    """The value of a JavaScript expression in the page, as plain data of bounded size."""
    value: Any = None

    async def evaluate(page: Page) -> None:
        nonlocal value
        value = await page.evaluate(expression)

    try:
        await pages.act(evaluate)
    except PageError as error:
        if not any(words in str(error) for words in ("await is only valid", "await is not defined")):
            raise
        expression = f"(async () => ({expression.strip().rstrip(';')}))()"
        await pages.act(evaluate)
    try:
        text = orjson.dumps(value, default=str)  # makes NaN null
    except TypeError:  # a circular value, say
        text = orjson.dumps(str(value))
    if len(text) <= RESULT_LIMIT:
        return orjson.loads(text)
    return text[:RESULT_LIMIT].decode("utf-8", "ignore") + "… (cut)"


async def _vision(pages: Pages, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    if context.vision is None:
        raise PageError("No vision model is configured for this run; use browser_snapshot.")

    async def shoot(page: Page) -> bytes:
        return await page.screenshot(type="jpeg", quality=80)

    picture = base64.b64encode(await pages.ask(shoot)).decode()
    try:
        analysis = await context.vision.ask(arguments["question"], [f"data:image/jpeg;base64,{picture}"])
    except ModelError as error:
        raise PageError(f"The vision model failed: {error}") from error
    return {"analysis": analysis} | await pages.place()


async def _after(pages: Pages, moved: bool) -> dict[str, Any]:
    """Where an action led, and what is to be seen there if that is another page."""
    return await pages.place() | (await pages.snapshot() if moved else {})


def _tool(name: str, description: str, do: Do, required: dict[str, Any], **optional: Any) -> Tool:
    parameters = {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }
    schema = ToolSchema(name=f"browser_{name}", description=description, parameters=parameters)
    return Tool(schema=schema, toolset="browser", run=_run(do), access=lambda arguments: _PAGE)


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_REF = _text("The element's ref from the last snapshot, such as @e5.")

BROWSER = Toolset(
    name="browser",
    missing=missing,
    tools=(
        _tool(
            "navigate",
            "Open a URL in the browser and get the page as a compact snapshot, with refs (@e5) for the elements to "
            "click or fill. Call it before the other browser tools. A server started in the terminal is reached at "
            "http://localhost:PORT.",
            _navigate,
            {"url": _text("The http or https URL to open.")},
        ),
        _tool(
            "snapshot",
            "Get the current page as text: its accessibility tree with refs (@e5) for browser_click and browser_type. "
            "Refs hold until the page changes.",
            _snapshot,
            {},
            full={
                "type": "boolean",
                "default": False,
                "description": "False: compact, what can be used and read. True: everything, with link addresses.",
            },
        ),
        _tool("click", "Click an element.", _click, {"ref": _REF}),
        _tool(
            "type",
            "Replace the content of an input field with a text; choose an option of a list by its label; give a file "
            "field the path of a file in the workspace.",
            _type,
            {"ref": _REF, "text": _text("The text, option or path.")},
        ),
        _tool(
            "scroll",
            "Scroll the page by most of a screen.",
            _scroll,
            {"direction": {"type": "string", "enum": ["up", "down"], "description": "Where to."}},
        ),
        _tool("back", "Go back to the page before; from a pop-up, to the page that opened it.", _back, {}),
        _tool(
            "press",
            "Press a key or a combination, on the element that has the focus.",
            _press,
            {"key": _text("Enter, Tab, Escape, ArrowDown, a character, or a combination such as Control+A.")},
        ),
        _tool("get_images", "List the page's images with address, alternative text and size.", _get_images, {}),
        _tool(
            "console",
            "Read the page's console messages and JavaScript errors, or evaluate a JavaScript expression in the page.",
            _console,
            {},
            clear={"type": "boolean", "default": False, "description": "Forget the messages once they are read."},
            expression=_text("JavaScript to evaluate instead; its value is the result. May use await."),
        ),
        _tool(
            "vision",
            "Ask a question about how the current page looks; a screenshot is shown to a vision model.",
            _vision,
            {"question": _text("What to find out.")},
        ),
    ),
)
