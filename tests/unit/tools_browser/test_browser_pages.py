"""The ten tools on real pages: what a model can do with them, and what it is told."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="the extra browser is not installed")

from gristmill.tools.base import AskModel
from gristmill.tools.browsing import downloads, pages
from support.browsing import MARKS, Session, Worker
from support.site import Site

pytestmark = MARKS


async def test_a_page_is_worked_through_with_the_tools_alone(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    assert page["title"] == "Shop"
    assert page["element_count"] == page["snapshot"].count(" @e")
    assert '- table "Prices":' in page["snapshot"] and 'cell "3"' in page["snapshot"]
    assert "status" not in page

    await session.context.sandbox.write("papers/plan.txt", b"12345")
    for field, text in (("Name", 'Ann "A" Ärger'), ("Colour", "Blue"), ("Note", "two\nlines")):
        typed = await session.ok("type", ref=session.ref(page, f'"{field}"'), text=text)
        assert typed["typed"] == text
    await session.ok("type", ref=session.ref(page, '"Paper"'), text="papers/plan.txt")
    await session.ok("click", ref=session.ref(page, '"As a gift"'))
    clicked = await session.ok("click", ref=session.ref(page, '"Send"'))
    assert clicked["clicked"] and "snapshot" not in clicked  # the same page, which can be asked for
    sent = (await session.ok("snapshot"))["snapshot"]
    assert 'Ann "A" Ärger|b|true|two lines|plan.txt:5' in sent.replace('\\"', '"')


async def test_refs_name_the_same_element_until_it_is_gone(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    link = session.ref(page, "Next page")
    assert session.ref(await session.ok("snapshot"), "Next page") == link
    assert session.ref(await session.ok("snapshot", full=True), "Next page") == link
    moved = await session.ok("click", ref=link.removeprefix("@"))
    assert moved["title"] == "Second" and "Second page" in moved["snapshot"]
    assert "not on the page any more" in await session.fails("click", ref=link)
    assert "no @e9999" in await session.fails("click", ref="@e9999")
    assert "is not a ref" in await session.fails("click", ref="#order button")


async def test_an_element_that_cannot_be_used_is_told_with_the_reason(
    session: Session, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await session.ok("navigate", url=site.url())
    context = session.context.state["browser"]._context
    context.set_default_timeout(500)
    assert "not enabled" in await session.fails("click", ref=session.ref(page, '"Later"'))
    wrong = await session.fails("type", ref=session.ref(page, '"Send"'), text="x")
    assert wrong.startswith("Element is not an <input>")
    error = await session.fails("type", ref=session.ref(page, '"Paper"'), text="no/such")
    assert "path of a file in the workspace" in error
    assert "Unknown key" in await session.fails("press", key="Hyper")


async def test_dialogs_are_answered_and_told(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    warned = await session.ok("click", ref=session.ref(page, '"Warn"'))
    assert warned["dialogs"] == [{"type": "alert", "message": "Careful!", "answer": "accepted"}]
    asked = await session.ok("click", ref=session.ref(page, '"Ask"'))
    assert [(said["type"], said["answer"]) for said in asked["dialogs"]] == [("confirm", "accepted"), ("prompt", "7")]
    assert "true 7" in (await session.ok("snapshot"))["snapshot"]
    leave = await session.ok("navigate", url=site.url("/leave"))
    await session.ok("type", ref=session.ref(leave, "textbox"), text="x")
    assert (await session.ok("click", ref=session.ref(leave, '"Go"')))["title"] == "Second"


async def test_a_pop_up_becomes_the_current_page_and_can_be_left(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    popup = await session.ok("click", ref=session.ref(page, "Help window"))
    assert popup["popups"] == [{"url": site.url("/popup"), "open": True}]
    assert popup["title"] == "Help" and "How to order" in popup["snapshot"]
    assert (await session.ok("back"))["title"] == "Shop"
    popup = await session.ok("click", ref=session.ref(await session.ok("snapshot"), "Help window"))
    await session.ok("click", ref=session.ref(popup, '"Close"'))
    assert (await session.ok("snapshot"))["title"] == "Shop"
    assert "no earlier page" in await session.fails("back")


async def test_pop_ups_beyond_the_limit_are_closed(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url("/windows"))
    await session.ok("click", ref=session.ref(page, '"Many"'))
    await session.ok("snapshot")
    async with asyncio.timeout(10):
        while len(session.context.state["browser"]._context.pages) > pages.PAGES_LIMIT:
            await asyncio.sleep(0.05)


async def test_frames_are_part_of_the_page(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    await session.ok("click", ref=session.ref(page, "In the frame"))
    assert "Clicked in frame" in (await session.ok("snapshot"))["snapshot"]


async def test_downloads_go_into_the_sandbox(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    box = session.context.sandbox
    first = (await session.ok("click", ref=session.ref(page, "Get the list")))["downloads"]
    assert first == [{"file": "price list.csv", "path": f"{box.workspace}/downloads/price list.csv", "bytes": 19}]
    assert await box.read(first[0]["path"], 100) == b"thing,price\npear,3\n"
    second = (await session.ok("navigate", url=site.url("/file")))["downloads"]
    assert second[0]["path"].endswith("/downloads/price list-2.csv")
    sly = (await session.ok("navigate", url=site.url("/file?name=..%2F..%2Fetc%2Fcron.d%2Fx")))["downloads"]
    assert Path(sly[0]["path"]).parent == Path(box.workspace, "downloads")
    assert (await session.ok("snapshot"))["title"] == "Shop"  # still there


async def test_a_download_that_is_too_large_is_refused(
    session: Session, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "DOWNLOAD_LIMIT", 1000)
    await session.ok("navigate", url=site.url())
    told = (await session.ok("navigate", url=site.url("/file?times=100")))["downloads"]
    assert "1900 bytes are more than" in told[0]["error"] and "path" not in told[0]
    host = session.context.shared["browser"]
    assert list(host._lair.downloads.iterdir()) == []


async def test_what_a_click_loads_is_there_when_it_is_done(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    await session.ok("click", ref=session.ref(page, '"Load"'))
    assert "Loaded late" in (await session.ok("snapshot"))["snapshot"]


async def test_console_messages_errors_and_expressions(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    await session.ok("click", ref=session.ref(page, '"Talk"'))
    said = await session.ok("console", clear=True)
    assert [message["text"] for message in said["console_messages"] if message["type"] == "log"] == ["said 42"]
    assert said["total_errors"] == 1 and "broken" in said["js_errors"][0]["message"]
    assert (await session.ok("console"))["total_errors"] == 0
    assert await session.value("[1, {a: 'ä'}]") == [1, {"a": "ä"}]
    assert await session.value("await fetch('/third').then(r => r.status)") == 200
    assert await session.value("document.body") == "ref: <Node>"
    assert await session.value("let a = {}; a.a = a; a") is not None
    assert str(await session.value("'x'.repeat(1e6)")).endswith("… (cut)")
    assert "Error: no" in await session.fails("console", expression="(() => { throw new Error('no') })()")
    assert await session.value("0/0") is None


async def test_a_page_that_floods_the_console_is_no_longer_listened_to(session: Session, site: Site) -> None:
    await session.ok("navigate", url=site.url("/noisy"))
    said = await session.ok("console")
    assert said["total_messages"] == pages.CONSOLE_LIMIT


async def test_images_scrolling_keys_and_history(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    images = (await session.ok("get_images"))["images"]
    assert images == [{"src": site.url("/dot.svg"), "alt": "A dot", "width": 9, "height": 9}]
    down = (await session.ok("scroll", direction="down"))["position"]
    assert down["top"] > 300 and down["height"] > 4000
    assert (await session.ok("scroll", direction="up"))["position"]["top"] == 0
    await session.ok("type", ref=session.ref(page, '"Name"'), text="Bo")
    await session.ok("press", key="Enter")
    assert "Bo|r" in (await session.ok("snapshot"))["snapshot"]
    await session.ok("navigate", url=site.url("/next"))
    assert (await session.ok("back"))["title"] == "Shop"


async def test_a_long_page_is_shown_in_part_and_in_full(session: Session, site: Site) -> None:
    short = await session.ok("navigate", url=site.url("/long"))
    assert len(short["snapshot"]) < 9_000 and "more lines; browser_snapshot with full=true" in short["snapshot"]
    full = await session.ok("snapshot", full=True)
    assert "link 1999" in full["snapshot"] and "/url: /next" in full["snapshot"]


async def test_statuses_and_pages_that_do_not_come(
    session: Session, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = await session.ok("navigate", url=site.url("/absent"))
    assert missing["status"] == 404 and "Nothing here" in missing["snapshot"]
    monkeypatch.setattr(pages, "NAVIGATE_SECONDS", 0.5)
    assert "did not load within" in await session.fails("navigate", url=site.url("/never"))
    assert "cannot be reached" in await session.fails("navigate", url="http://127.0.0.1:1234/")
    assert (await session.ok("navigate", url=site.url("/third")))["title"] == "Third"


async def test_nothing_works_without_a_page(session: Session) -> None:
    for tool, arguments in (
        ("snapshot", {}),
        ("click", {"ref": "@e1"}),
        ("back", {}),
        ("press", {"key": "Enter"}),
        ("get_images", {}),
        ("console", {"expression": "1"}),
        ("scroll", {"direction": "up"}),
    ):
        assert "browser_navigate" in await session.fails(tool, **arguments), tool
    assert (await session.ok("console"))["total_messages"] == 0


async def test_a_vision_model_sees_the_page(session: Session, site: Site) -> None:
    await session.ok("navigate", url=site.url("/third"))
    assert "No vision model" in await session.fails("vision", question="What is it?")
    seen: list[bytes] = []

    async def look(question: str, images: list[str]) -> str:
        assert question == "What is it?"
        seen.append(base64.b64decode(images[0].removeprefix("data:image/jpeg;base64,")))
        return "A heading."

    session.context.vision = AskModel(look)
    assert (await session.ok("vision", question="What is it?"))["analysis"] == "A heading."
    assert seen[0][:3] == b"\xff\xd8\xff" and len(seen[0]) > 2_000


async def test_sessions_share_a_browser_and_nothing_else(session: Session, site: Site, worker: Worker) -> None:
    other = await worker.session(allow_private_urls=True)
    for each in (session, other):
        await each.ok("navigate", url=site.url("/third"))
    assert await session.value("document.cookie = 'secret=1'; localStorage.secret = 1; document.cookie") == "secret=1"
    assert await other.value("document.cookie + (localStorage.secret || '')") == ""
    assert len({each.context.state["browser"]._host for each in (session, other)}) == 1
