"""Every tool in a session of its own, through the command line, with real parts: rows, statistics, records, keys.

One run with many prompts: in each, one call that works and one that fails. Searches and pages come from a small corpus,
vision from a scripted endpoint, pictures from a server that draws with Pillow, pages from the session's own sandbox.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from PIL import Image

from gristmill.config import KEY_VARIABLES, TOOL_VARIABLES
from gristmill.run.reader import RunReader
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, calls, fail, say
from gristmill.tools.browser import BROWSER
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP
from support.runs import Place, every_byte_of
from support.services import MCP_SERVER, ImageServer, drawn, mcp_over_http

pytest.importorskip("mcp", reason="the extra mcp is not installed")
pytest.importorskip("trafilatura", reason="the extra web is not installed")

CANARIES = {name: f"canary-{name}-5f0c9a" for name in (*KEY_VARIABLES.values(), *TOOL_VARIABLES) if "KEY" in name}
CANARIES |= {"BOX_TOKEN": "canary-BOX_TOKEN-5f0c9a", "FAR_TOKEN": "canary-FAR_TOKEN-5f0c9a"}
MODEL_KEY = "canary-model-5f0c9a"

PICTURE = base64.b64encode(drawn("60x40")).decode()
PAGES = {
    "site/one.html": "<title>One</title><h1>First page</h1><img src='x.png' alt='A mill'>"
    "<input aria-label='Name'><button onclick='this.textContent = 1'>Go</button>"
    "<div style='height: 3000px'></div><script>console.log('hello from the page')</script>",
    "site/two.html": "<title>Two</title><h1>Second page</h1>",
}
SERVE = (
    "cd site && { python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & }; cd ..; "
    "until (echo > /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.02; done"
)
ALPHA = {"files": {"a.txt": "alpha\n"}}
SITE = {"files": PAGES, "setup": SERVE}
OPEN: tuple[str, dict[str, Any]] = ("browser_navigate", {"url": "http://localhost:8000/one.html"})
LOOK = "env; cat /proc/*/environ | tr '\\0' '\\n'; cat /proc/*/cmdline | tr '\\0' ' '"


@dataclass(frozen=True)
class Case:
    """One session: the call that works and what its result says, the call that fails and its error."""

    toolset: str
    tool: str
    good: dict[str, Any]
    says: str
    bad: dict[str, Any]
    error: str
    before: tuple[tuple[str, dict[str, Any]], ...] = ()
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return f"Use {self.tool} of {self.toolset}."

    @property
    def turns(self) -> list[Turn]:
        steps = [*self.before, (self.tool, self.good), (self.tool, self.bad)]
        return [*(call(*step, reasoning="next") for step in steps), say("That is all.", reasoning="done")]


def browser(name: str, good: dict[str, Any], says: str, bad: dict[str, Any], error: str, *more: Any) -> Case:
    return Case("browser", f"browser_{name}", good, says, bad, error, before=(OPEN, *more), row=SITE)


CASES = [
    Case("web", "web_search", {"query": "hmac digest"}, "corpus://library/hmac.html", {}, "query"),
    Case(
        *("web", "web_extract", {"urls": ["corpus://library/hmac.html"]}, "compare_digest"),
        *({"urls": ["corpus://nope.html"]}, "no such document"),
    ),
    Case(
        *("search", "web_search", {"query": "shallow copy"}, "corpus://library/copy.html"),
        *({"query": "shallow copy", "limit": 0}, "limit"),
    ),
    Case(
        *("vision", "vision_analyze", {"image_url": "photo.png", "question": "What is it?"}, "A green square."),
        *({"image_url": "photo.png", "question": "Please echo."}, "The vision model failed"),
        row={"setup": f"echo {PICTURE} | base64 -d > photo.png"},
    ),
    Case(
        *("image_gen", "image_generate", {"prompt": "a mill", "aspect_ratio": "portrait"}, "/images/generated-1.png"),
        *({"prompt": "echo"}, "HTTP 400"),
        row={"verify": "head -c 4 images/generated-1.png | grep -q PNG"},
    ),
    Case("terminal", "terminal", {"command": LOOK}, "PATH=", {"command": "sleep 9", "timeout": 1}, "timed out"),
    Case("terminal", "process", {"action": "list"}, "processes", {"action": "poll", "session_id": "no"}, "no"),
    Case("file", "read_file", {"path": "a.txt"}, "1|alpha", {"path": "b.txt"}, "b.txt", row=ALPHA),
    Case("file", "write_file", {"path": "a.txt", "content": "x"}, "bytes_written", {"path": "a.txt"}, "content"),
    Case(
        *("file", "patch", {"path": "a.txt", "old_string": "alpha", "new_string": "beta"}, "+beta"),
        *({"path": "a.txt", "old_string": "gamma", "new_string": "beta"}, "old_string"),
        row={**ALPHA, "verify": "grep -q beta a.txt"},
    ),
    Case("file", "search_files", {"pattern": "alp.a"}, "a.txt", {"pattern": "("}, "(", row=ALPHA),
    Case("browser", *OPEN, "First page", {"url": "http://169.254.169.254/latest"}, "not a public address", row=SITE),
    browser("snapshot", {"full": True}, "First page", {"full": "perhaps"}, "full"),
    browser("click", {"ref": "@e2"}, "clicked", {"ref": "@e99"}, "@e99"),
    browser("type", {"ref": "@e1", "text": "Ann"}, "Ann", {"ref": "@e99", "text": "Ann"}, "@e99"),
    browser("scroll", {"direction": "down"}, "scrolled", {"direction": "sideways"}, "direction"),
    browser("press", {"key": "Tab"}, "pressed", {"key": "NoSuchKey"}, "NoSuchKey"),
    browser("get_images", {}, "A mill", {"all": True}, "all"),
    browser("console", {}, "hello from the page", {"expression": "nothing.there"}, "nothing"),
    browser("vision", {"question": "What is it?"}, "A green square.", {}, "question"),
    browser(
        "back", {}, "First page", {}, "no earlier page", ("browser_navigate", {"url": "http://localhost:8000/two.html"})
    ),
    Case("box", "add", {"a": 40, "b": 2}, "42", {"a": "x"}, "a"),
    Case("far", "point", {"x": 3}, '"y": 3', {"x": "no"}, "x"),
    Case(
        *("notes", "remember", {"text": "Mill"}, '"characters": 4', {"text": ""}, "nothing to remember"),
        row={"verify": "grep Mill note.txt"},
    ),
]
NO_BROWSER = BROWSER.missing({})
RUN = [case for case in CASES if case.toolset != "browser" or not NO_BROWSER]

NOTES = '''
from typing import Any
from gristmill import Sandbox, tool

@tool(toolset="notes")
async def remember(text: str, sandbox: Sandbox) -> dict[str, Any]:
    """Write a note down."""
    if not text:
        raise ValueError("nothing to remember")
    await sandbox.write("note.txt", text.encode())
    return {"characters": len(text)}
'''


def servers(url: str) -> dict[str, Any]:
    """Two MCP servers, each with its key, of which not all tools are offered."""
    import sys

    box = {"command": sys.executable, "args": [MCP_SERVER, "stdio"], "env": {"TOKEN": "${BOX_TOKEN}"}}
    far = {"url": url, "headers": {"Authorization": "Bearer ${FAR_TOKEN}"}}
    return {
        "mcpServers": {
            "box": {**box, "tools": ["add", "environment"]},
            "brittle": {**box, "tools": ["identity", "die"]},
            "far": {**far, "tools": ["point", "header"]},
        },
        "allowedVariables": ["BOX_TOKEN", "FAR_TOKEN"],
    }


def vision_script(request: dict[str, Any], headers: Any) -> Turn:
    if "echo" in json.dumps(request):
        return fail(400, {"error": {"message": f"no right for {headers['Authorization']}"}})
    return say("A green square.")


def records(place: Place) -> dict[int, dict[str, Any]]:
    with RunReader(place.directory) as reader:
        return {record["prompt_index"]: record for batch in reader.layout.batches() for record in reader.records(batch)}


def results(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What the tools answered, in order."""
    found = []
    for turn in row["conversations"]:
        if turn["from"] == "tool":
            for block in turn["value"].split("<tool_response>")[1:]:
                found.append(json.loads(block.partition("</tool_response>")[0]))
    return found


def test_each_tool_has_a_session_and_no_key_leaves_its_host(place: Place, corpus: pytest.MonkeyPatch) -> None:
    for name, value in CANARIES.items():
        corpus.setenv(name, value)
    (place.root / "notes.py").write_text(NOTES)
    extra = [
        {"prompt": "Let it die.", "toolsets": ["brittle"]},
        {"prompt": "Ask for keys.", "toolsets": ["box", "far"]},
        {"prompt": "One tool only.", "toolsets": ["tool:identity", "tool:read_file"]},
    ]
    place.dataset(*({"prompt": case.prompt, "toolsets": [case.toolset], **case.row} for case in RUN), *extra)
    script = {case.prompt: case.turns for case in RUN} | {
        "Let it die.": [
            call("identity", reasoning="r"),
            calls(("die", {}), ("identity", {})),
            call("identity"),
            say("ok"),
        ],
        "Ask for keys.": [
            calls(*(("environment", {"name": name}) for name in ("TOKEN", "FAL_KEY", "TAVILY_API_KEY")), reasoning="r"),
            call("header", {"name": "authorization"}),
            say("ok"),
        ],
        "One tool only.": [say("ok", reasoning="r")],
    }
    draws = ImageServer()
    with (
        ScriptedEndpoint(script, api_key=MODEL_KEY).in_thread() as endpoint,
        ScriptedEndpoint(vision_script, api_key=CANARIES["VISION_API_KEY"]).in_thread() as sees,
        draws.in_thread(),
        mcp_over_http() as far,
    ):
        (place.root / "servers.json").write_text(json.dumps(servers(far)))
        for name, value in {
            "VISION_MODEL": "seer",
            "VISION_BASE_URL": sees.url,
            "IMAGE_MODEL": "painter",
            "IMAGE_BASE_URL": draws.url,
        }.items():
            corpus.setenv(name, value)
        printed = place.run(
            endpoint.url,
            *("--tools=notes:remember", "--mcp_config=servers.json", f"--api_key={MODEL_KEY}", "--num_workers=1"),
        )

    rows = {row["prompt_index"]: row for row in place.merged()}
    kept = records(place)
    assert len(rows) == len(kept) == len(RUN) + len(extra), printed
    known = json.loads((place.directory / "run.json").read_text())["known_tools"]
    assert known[:20] == list(TOOL_TO_TOOLSET_MAP)
    assert set(known[20:]) == {"remember", "add", "environment", "identity", "die", "point", "header"}
    assert all(list(row["tool_stats"]) == list(row["tool_error_counts"]) == known for row in rows.values())
    for index, case in enumerate(RUN):
        check_session(case, rows[index], kept[index])

    offered = {seen.body["messages"][1]["content"]: seen.body["tools"] for seen in endpoint.requests}
    names = {prompt: [tool["function"]["name"] for tool in tools] for prompt, tools in offered.items()}
    assert names["Use add of box."] == ["add", "environment"], "an allow-list says what is offered"
    assert names["One tool only."] == ["read_file", "identity"]
    check_pictures(sees, draws)
    check_restart(rows[len(RUN)])
    check_keys(place, printed, endpoint, sees, draws, rows[len(RUN) + 1])


@pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER or "a browser is here")
def test_the_default_distribution_has_everything(place: Place, corpus: pytest.MonkeyPatch) -> None:
    """All six toolsets are offered and work side by side in one session; a second look finds nothing to do."""
    steps: list[tuple[str, dict[str, Any]]] = [
        ("web_search", {"query": "hmac"}),
        ("image_generate", {"prompt": "a mill", "aspect_ratio": "square"}),
        ("vision_analyze", {"image_url": f"data:image/png;base64,{PICTURE}", "question": "What is it?"}),
        ("write_file", {"path": "note.txt", "content": "flour"}),
        ("terminal", {"command": "cat note.txt"}),
        OPEN,
    ]
    place.dataset({"prompt": "Use everything.", **SITE})
    draws = ImageServer()
    script = [calls(*steps, reasoning="all at once"), say("done")]
    with (
        ScriptedEndpoint(script).in_thread() as endpoint,
        ScriptedEndpoint(vision_script).in_thread() as sees,
        draws.in_thread(),
    ):
        corpus.setenv("VISION_MODEL", "seer")
        corpus.setenv("VISION_BASE_URL", sees.url)
        corpus.setenv("IMAGE_MODEL", "painter")
        corpus.setenv("IMAGE_BASE_URL", draws.url)
        flags = ("--distribution=default", "--num_workers=1")
        planned = place.run(endpoint.url, *flags, "--dry_run")
        assert "Toolsets: web, vision, image_gen, terminal, file, browser\n" in planned
        assert not place.directory.exists() and endpoint.count == 0
        place.run(endpoint.url, *flags)
        (offered,) = {tuple(tool["function"]["name"] for tool in seen.body["tools"]) for seen in endpoint.requests}
        place.run(endpoint.url, *flags, "--resume")
        corpus.setenv("WEB_PROVIDER", "ddgs")
        assert "WEB_PROVIDER: corpus → ddgs" in place.run(endpoint.url, *flags, "--resume", status=1)
        assert endpoint.count == 2
    assert offered == tuple(TOOL_TO_TOOLSET_MAP)
    (row,) = place.merged()
    assert row["toolsets_used"] == ["web", "vision", "image_gen", "terminal", "file", "browser"]
    called = {name: stats for name, stats in row["tool_stats"].items() if stats["count"]}
    assert called == {name: {"count": 1, "success": 1, "failure": 0} for name, _ in steps}
    assert [result["name"] for result in results(row)] == [name for name, _ in steps]
    assert place.statistics()["toolset_frequencies"]["browser"]["sessions"] == 1
    # What the vision model used counts too.
    assert row["usage"]["prompt_tokens"] > sum(seen["usage"]["prompt_tokens"] for seen in answers(place))


def answers(place: Place) -> list[dict[str, Any]]:
    """The session model's replies, from the session record."""
    return [turn["reply"] for turn in records(place)[0]["turns"]]


def check_session(case: Case, row: dict[str, Any], record: dict[str, Any]) -> None:
    """The row's conversation, its statistics and the session record tell the same of a session."""
    where = case.prompt
    assert (row["outcome"], row["toolsets_used"]) == ("completed", [case.toolset]), where
    assert row["conversations"][1] == {"from": "human", "value": where, "tool_calls": []}
    used = {name: stats for name, stats in row["tool_stats"].items() if stats["count"]}
    worked = Counter([*(name for name, _ in case.before), case.tool])
    failed = Counter([case.tool])
    assert used == {
        name: {"count": worked[name] + failed[name], "success": worked[name], "failure": failed[name]}
        for name in worked
    }, where
    assert row["tool_error_counts"][case.tool] == 1, where
    good, bad = results(row)[-2:]
    assert good["name"] == bad["name"] == case.tool
    assert case.says in json.dumps(good["content"], ensure_ascii=False).replace("\\", ""), (where, good)
    assert case.error in json.dumps(bad["content"], ensure_ascii=False), (where, bad)
    if "verify" in case.row:
        assert row["graded"] and row["reward"] == 1.0, where

    called = [c for turn in row["conversations"] for c in turn["tool_calls"]]
    steps = [*case.before, (case.tool, case.good), (case.tool, case.bad)]
    assert [(c["name"], json.loads(c["arguments"])) for c in called] == [(n, a) for n, a in steps], where
    kept = record["results"]
    assert [(r["name"], r["ok"]) for r in kept] == [
        *((name, True) for name, _ in case.before),
        (case.tool, True),
        (case.tool, False),
    ]
    assert [r["call_id"] for r in kept] == [c["id"] for c in called]
    assert all(r["seconds"] >= 0 for r in kept) and case.error in kept[-1]["error"], where
    assert case.tool in [tool["name"] for tool in record["tools"]], where
    assert [m["role"] for m in record["messages"]] == ["user", *["assistant", "tool"] * len(steps), "assistant"], where


def check_pictures(sees: ScriptedEndpoint, draws: ImageServer) -> None:
    """The vision model got the picture of the sandbox, and a screenshot; the painter the words and the shape."""
    urls = [
        part["image_url"]["url"]
        for seen in sees.requests
        for part in seen.body["messages"][-1]["content"]
        if "image_url" in part
    ]
    sizes = []
    for url in urls:
        head, _, data = url.partition(",")
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            sizes.append((head, picture.size))
    assert ("data:image/png;base64", (60, 40)) in sizes
    assert NO_BROWSER or ("data:image/jpeg;base64", (1280, 720)) in sizes
    assert draws.requests[0][1] == {
        "model": "painter",
        "prompt": "a mill",
        "n": 1,
        "size": "1024x1536",
    }


def check_restart(row: dict[str, Any]) -> None:
    """A server that dies in the middle is an error result; the next call starts it again, as another process."""
    before, died, beside, after = (result["content"] for result in results(row))
    assert "broke" in died["error"] and "connects again" in died["error"]
    assert after["result"] != before["result"]
    assert row["tool_stats"]["die"] == {"count": 1, "success": 0, "failure": 1}
    assert row["outcome"] == "completed" and "result" in beside | {"result": 1}


def check_keys(
    place: Place,
    printed: str,
    endpoint: ScriptedEndpoint,
    sees: ScriptedEndpoint,
    draws: ImageServer,
    asked: dict[str, Any],
) -> None:
    """Each key went to its own host and nowhere else: no file, no line, no sandbox, no other program."""
    assert "started with ***." in asked["conversations"][0]["value"]
    told = [result["content"]["result"] for result in results(asked)]
    assert told == ["TOKEN=***", "FAL_KEY=", "TAVILY_API_KEY=", "***"]
    everything = {
        "a file": every_byte_of(place.root),
        "the console": printed.encode(),
        "the model": json.dumps([[seen.body, seen.headers] for seen in endpoint.requests]).encode(),
        "the vision model": json.dumps([[seen.body, seen.headers] for seen in sees.requests]).encode(),
        "the painter": json.dumps(draws.requests).encode(),
    }
    own = {
        "the model": MODEL_KEY,
        "the vision model": CANARIES["VISION_API_KEY"],
        "the painter": CANARIES["IMAGE_API_KEY"],
    }
    for where, data in everything.items():
        for key in (MODEL_KEY, *CANARIES.values()):
            assert (key.encode() in data) is (own.get(where) == key), f"{key} and {where}"
