"""Pages that hang or crash, browsers that die, workers that are killed: what is told, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("playwright", reason="the extra browser is not installed")

from gristmill.tools.browser import BROWSER
from gristmill.tools.browsing import PageError, chromium, pages
from gristmill.tools.browsing.chromium import Confinement, Lair, confinements, sweep
from gristmill.tools.browsing.host import BrowserHost
from support.browsing import BWRAP, MARKS, WAYS, Session, Worker
from support.site import Site

pytestmark = MARKS
OURS = (chromium.PREFIX, "playwright")


def family(name: str) -> list[psutil.Process]:
    """This process's descendants whose command line holds a word."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def kill(name: str) -> None:
    for process in family(name):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


async def test_a_page_that_hangs_is_given_up_and_its_process_ends(
    session: Session, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("HANG_SECONDS", 2.0), ("SETTLE_SECONDS", 0.5)):
        monkeypatch.setattr(pages, name, seconds)
    page = await session.ok("navigate", url=site.url())
    session.context.state["browser"]._context.set_default_timeout(1000)
    error = await session.fails("click", ref=session.ref(page, '"Hang"'))
    assert "did not answer any more" in error and "browser_navigate" in error
    assert "did not answer any more" in await session.fails("snapshot")
    renderers = family("--type=renderer")
    before = sum(process.cpu_times().user for process in renderers if process.is_running())
    await asyncio.sleep(0.5)
    spent = sum(process.cpu_times().user for process in renderers if process.is_running()) - before
    assert spent < 0.3
    assert (await session.ok("navigate", url=site.url("/third")))["title"] == "Third"


async def test_a_page_that_crashes_is_told_once_more(session: Session, site: Site, worker: Worker) -> None:
    other = await worker.session(allow_private_urls=True)
    for each in (session, other):
        await each.ok("navigate", url=site.url("/third"))
    page = session.context.state["browser"].current()
    with pytest.raises(Exception, match=r"crash|ERR_ABORTED|closed"):
        await page.goto("chrome://crash", timeout=5000)
    error = await session.fails("snapshot")
    assert "The page crashed." in error and "browser_navigate" in error
    assert (await other.ok("snapshot"))["title"] == "Third"
    assert (await session.ok("navigate", url=site.url("/next")))["title"] == "Second"


@pytest.mark.parametrize("victim", ["chromium", "driver"])
async def test_after_a_crash_of_the_browser_sessions_go_on_with_a_new_one(
    session: Session, site: Site, worker: Worker, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A temporary directory of its own, since other tests use the system's at the same time.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = await worker.session(allow_private_urls=True)
    for each in (session, other):
        await each.ok("navigate", url=site.url("/third"))
    mark = "--remote-debugging-pipe" if victim == "chromium" else "run-driver"
    kill(mark)
    await asyncio.sleep(0.3)
    for each in (session, other):
        error = await each.fails("snapshot")
        assert "browser_navigate" in error, error
    for each in (other, session):
        assert (await each.ok("navigate", url=site.url("/third")))["title"] == "Third"
    assert len(family("run-driver")) == 1
    await worker.end_sessions()
    await session.context.shared["browser"].close()
    session.context.shared.clear()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(OURS)]


@pytest.mark.parametrize("victim", ["--remote-debugging-pipe", "run-driver"])
async def test_a_call_during_which_the_browser_dies_fails(session: Session, site: Site, victim: str) -> None:
    await session.ok("navigate", url=site.url("/third"))
    waiting = asyncio.create_task(session.call("navigate", url=site.url("/never")))
    await asyncio.sleep(0.5)
    kill(victim)
    result = await waiting
    assert result["success"] is False and "crashed" in result["error"], result
    assert (await session.ok("navigate", url=site.url("/third")))["title"] == "Third"


async def test_after_a_crash_of_a_pop_up_its_opener_is_there(session: Session, site: Site) -> None:
    page = await session.ok("navigate", url=site.url())
    await session.ok("click", ref=session.ref(page, "Help window"))
    with pytest.raises(Exception, match=r"crash|ERR_ABORTED|closed"):
        await session.context.state["browser"].current().goto("chrome://crash", timeout=5000)
    async with asyncio.timeout(10):
        while len(session.context.state["browser"]._pages) > 1:
            await asyncio.sleep(0.02)
    shop = await session.ok("snapshot")
    assert shop["title"] == "Shop" and shop["note"].startswith("The page crashed.")
    assert "note" not in await session.ok("snapshot")


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.08, 0.4])
async def test_nothing_is_left_of_a_session_that_is_cancelled(
    session: Session, site: Site, worker: Worker, delay: float
) -> None:
    other = await worker.session(allow_private_urls=True)
    await other.ok("navigate", url=site.url("/third"))
    call = asyncio.create_task(session.call("navigate", url=site.url("/never")))
    await asyncio.sleep(delay)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await session.end()
    host = session.context.shared["browser"]
    async with asyncio.timeout(10):
        while len(host._running.browser.contexts) > 1 or host._unwanted:
            await asyncio.sleep(0.02)
    assert set(host._proxy._outlets.values()) == {other.context.state["browser"].outlet}


@pytest.mark.parametrize("bubblewrap", WAYS)
async def test_a_closed_host_leaves_nothing(
    site: Site, bubblewrap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = set(psutil.Process().children(recursive=True))
    worker = Worker()
    worker.shared["browser"] = host = BrowserHost(
        chromium.find_executable({}), [way for way in confinements() if way.bubblewrap == bubblewrap]
    )
    worker.shared_closers.append(host.close)
    session = await worker.session(allow_private_urls=True)
    assert (await session.ok("navigate", url=site.url("/third")))["title"] == "Third"
    assert host.confinement is not None and host.confinement.bubblewrap is bubblewrap
    assert set(family("chrom")) - others
    await worker.end()
    assert set(psutil.Process().children(recursive=True)) <= others
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(OURS)]
    with pytest.raises(PageError, match="ending"):
        await host.open(session.context.state["browser"].outlet)


async def test_a_browser_that_does_not_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no display here >&2\nexit 3\n")
    broken.chmod(0o755)
    worker = Worker()
    session = await worker.session(settings={"BROWSER_EXECUTABLE": str(broken)})
    error = await session.fails("navigate", url="http://example.com/")
    assert "does not start" in error and str(broken) in error
    await worker.end()


async def test_what_is_missing_is_said() -> None:
    assert "is not a program" in BROWSER.missing({"BROWSER_EXECUTABLE": "/no/such/chromium"})
    assert BROWSER.missing({"BROWSER_EXECUTABLE": chromium.find_executable({})}) == ""


@pytest.mark.skipif(not BWRAP, reason="needs bubblewrap")
async def test_a_confined_browser_sees_no_file_and_no_network_of_the_host(
    session: Session, site: Site, tmp_path: Path
) -> None:
    await session.ok("navigate", url=site.url("/third"))
    host = session.context.shared["browser"]
    assert host.confinement.bubblewrap
    main = next(process for process in family("--remote-debugging-pipe") if "bwrap" not in process.name())
    inside = Path(f"/proc/{main.pid}/root")
    assert not (inside / "root/.ssh").exists() and not (inside / tmp_path.relative_to("/")).exists()
    assert not (inside / "etc/shadow").exists() and not Path(f"{inside}{Path.cwd()}/pyproject.toml").exists()
    devices = Path(f"/proc/{main.pid}/net/dev").read_text()
    assert "lo:" in devices and len(devices.splitlines()) == 3
    environment = Path(f"/proc/{main.pid}/environ").read_bytes()
    assert b"PYTEST" not in environment and b"VIRTUAL_ENV" not in environment


SCRIPT = """
import asyncio, sys
from support.browsing import MARKS, Worker
from gristmill.tools.browsing import chromium
from gristmill.tools.browsing.host import BrowserHost
async def main():
    worker = Worker()
    ways = [way for way in chromium.confinements() if way.bubblewrap == (sys.argv[2] == "True")]
    worker.shared["browser"] = BrowserHost(chromium.find_executable({}), ways)
    for number in range(2):
        session = await worker.session(allow_private_urls=True)
        await session.ok("navigate", url=sys.argv[1])
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("bubblewrap", WAYS)
@pytest.mark.parametrize("group", [False, True], ids=["worker", "whole-group"])
async def test_a_killed_worker_leaves_no_process(site: Site, bubblewrap: bool, group: bool, tmp_path: Path) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(SCRIPT), site.url("/third"), str(bubblewrap)),
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert worker.stdout is not None
    assert (await worker.stdout.readline()) == b"ready\n"
    children = psutil.Process(worker.pid).children(recursive=True)
    assert any("renderer" in " ".join(child.cmdline()) for child in children)
    if group:
        os.killpg(worker.pid, signal.SIGKILL)
    else:
        worker.kill()
    await worker.wait()
    deadline = time.monotonic() + 10
    while any(_lives(child) for child in children) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    left = [child for child in children if _lives(child)]
    for child in left:
        child.kill()
    assert left == []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_what_a_killed_worker_left_on_disk_is_swept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = Lair()
    dead = Lair()
    assert dead._lock is not None
    dead._lock.close()
    foreign = tmp_path / (chromium.PREFIX + "unlocked")
    foreign.mkdir()
    assert sweep() == 1
    assert living.path.exists() and foreign.exists() and not dead.path.exists()
    living.remove()
    living.remove()
    assert not living.path.exists()


async def test_ways_to_confine_begin_with_the_safest() -> None:
    ways: Any = confinements()
    assert ways[-1] == Confinement(False, False)
    assert [way for way in ways if way.bubblewrap] == list(ways[: 2 if BWRAP else 0])
