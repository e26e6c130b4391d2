"""Whole runs with a browser: each session works through a page of its own sandbox, with browser tools alone."""

from __future__ import annotations

import json
import time
from typing import Any

import psutil
import pytest

from gristmill.testing.endpoint import ScriptedEndpoint, call, say
from gristmill.tools.browser import BROWSER
from support.runs import Place

pytestmark = pytest.mark.skipif(bool(BROWSER.missing({})), reason=BROWSER.missing({}) or "a browser is here")

INDEX = """<!doctype html><title>Order</title>
<form onsubmit="event.preventDefault(); sent.textContent = 'Sent for ' + who.value">
<label>Name <input id="who"></label><button>Send</button></form><p id="sent"></p>
<table><caption>Prices</caption><tr><th>Thing</th><th>Price</th></tr><tr><td>Pear</td><td>3</td></tr></table>
<button onclick="sure.textContent = 'Answer ' + confirm('Sure?')">Ask</button><p id="sure"></p>
<a href="help.html" target="_blank">Help</a>
<iframe src="frame.html" title="Inner"></iframe>
<a href="list.csv" download>Price list</a>"""
FILES = {
    "site/index.html": INDEX,
    "site/help.html": "<title>Help</title><h1>How to order</h1>",
    "site/frame.html": "<button onclick=\"this.textContent = 'Pressed inside'\">Press me</button>",
    "site/list.csv": "thing,price\npear,3\n",
}
# Numbers of the refs in the order of the page: name, send, ask, help, the frame's button, the list.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("browser_navigate", {"url": "http://localhost:8000/"}),
    ("browser_type", {"ref": "@e1", "text": "Ann"}),
    ("browser_click", {"ref": "@e2"}),
    ("browser_click", {"ref": "@e3"}),
    ("browser_click", {"ref": "@e5"}),
    ("browser_click", {"ref": "@e6"}),
    ("browser_snapshot", {}),
    ("browser_click", {"ref": "@e4"}),
    ("browser_back", {}),
    ("browser_scroll", {"direction": "down"}),
    ("browser_press", {"key": "Tab"}),
    ("browser_get_images", {}),
    ("browser_console", {"expression": "document.title"}),
    ("browser_navigate", {"url": "http://169.254.169.254/latest"}),
]


def test_pages_are_worked_through_in_a_whole_run(place: Place) -> None:
    script = [call(name, arguments, reasoning="next") for name, arguments in CALLS]
    serve = "cd site && { python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & }; cd ..; "
    wait = "until (echo > /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done"
    rows = [
        {"prompt": f"Order {n}", "files": FILES, "setup": serve + wait, "verify": "grep -q pear downloads/list.csv"}
        for n in range(3)
    ]
    place.dataset(*rows)
    with ScriptedEndpoint([*script, say("All done.", reasoning="done")]).in_thread() as endpoint:
        place.run(endpoint.url, "--distribution=browser_only", "--max_turns=20", "--num_workers=1")

    merged = place.merged()
    assert [row["outcome"] for row in merged] == ["completed"] * 3
    for row in merged:
        assert row["toolsets_used"] == ["browser"] and row["reward"] == 1.0
        assert row["tool_stats"]["browser_click"] == {"count": 5, "success": 5, "failure": 0}
        assert row["tool_stats"]["browser_navigate"] == {"count": 2, "success": 1, "failure": 1}
        results = [turn["value"] for turn in row["conversations"] if turn["from"] == "tool"]
        assert len(results) == len(CALLS)
        asked, pressed = results[3], results[4]
        assert '"message": "Sure?"' in asked or '"message":"Sure?"' in asked
        assert "clicked" in pressed
        assert "downloads/list.csv" in results[5]
        for words in ("Sent for Ann", "Answer true", "Pressed inside", "Pear", "Prices"):
            assert words in results[6], words
        assert "How to order" in results[7] and "Order" in results[8]
        assert "not a public address" in results[13]
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(place.temp) in json.dumps(process.info)]
    assert not list(place.temp.glob("gristmill-browser-*")) and not list(place.temp.glob("playwright*"))


def test_a_killed_runner_leaves_no_browser(place: Place) -> None:
    place.dataset(*(f"Wait {n}" for n in range(2)))
    # The second answer never comes: the sessions sit there with their pages open.
    script = [call("browser_navigate", {"url": "http://localhost:8000/"}), say("Done.", latency=600)]
    with ScriptedEndpoint(script).in_thread() as endpoint:
        runner = place.start(endpoint.url, "--distribution=browser_only", "--num_workers=1")
        below = psutil.Process(runner.pid)
        deadline = time.monotonic() + 60
        while not (all_of := below.children(recursive=True)) or not any(map(_renders, all_of)):
            assert runner.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        all_of = below.children(recursive=True)
        runner.kill()
        runner.communicate()
        _, left = psutil.wait_procs(all_of, timeout=30)
        for process in left:
            process.kill()
        assert left == []


def _renders(process: psutil.Process) -> bool:
    try:
        return "--type=renderer" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
