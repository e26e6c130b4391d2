"""What pages can reach: the public internet by rule, the session's own sandbox, and nothing else of this machine."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("playwright", reason="the extra browser is not installed")

from gristmill.sandbox.base import Job
from gristmill.tools.browsing import chromium, relay
from gristmill.tools.browsing.chromium import confinements
from gristmill.tools.browsing.host import BrowserHost
from gristmill.tools.browsing.proxy import Outlet
from support.browsing import MARKS, WAYS, Session, Worker
from support.site import Site

# A server for inside a sandbox: files, an echo of bodies, and an echo of WebSocket messages. Standard library only.
SERVER = r"""
import base64, hashlib, http.server, socketserver, sys
class H(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def answer(self, body, kind="text/html"):
        self.send_response(200); self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(hashlib.sha256(body).hexdigest().encode())
    def do_GET(self):
        if self.path == "/ws": return self.socket()
        if self.path == "/big": return self.answer(bytes(range(256)) * 12000, "application/octet-stream")
        if self.path == "/worker.js":
            return self.answer(b"self.onfetch = e => { if (e.request.url.includes('/viaworker')) "
                b"e.respondWith(fetch(e.request.url.split('?')[1], {mode: 'no-cors'})"
                b".then(r => new Response('got:' + r.type + r.status + (r.headers.get('x-gristmill-proxy') || '')),"
                b" x => new Response('no'))) }", "text/javascript")
        if self.path.startswith("/to?"):
            self.send_response(302); self.send_header("Location", self.path[4:])
            self.send_header("Content-Length", "0"); return self.end_headers()
        self.answer(b"<title>Inside</title><h1>Served inside</h1><a href='/again'>Again</a>")
    def socket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101); self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8: return
            size = head[1] & 127
            mask = self.rfile.read(4); data = self.rfile.read(size)
            self.wfile.write(bytes([129, size]) + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))
            self.wfile.flush()
class S(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
s = S(("127.0.0.1", 0), H); print(s.server_address[1], flush=True); s.serve_forever()
"""

pytestmark = MARKS


async def serve(session: Session) -> tuple[int, Job]:
    """The port of a server inside the session's sandbox, and its job."""
    box = session.context.sandbox
    await box.write("server.py", SERVER.encode())
    job = await box.spawn("exec python3 server.py")
    async with asyncio.timeout(20):
        while b"\n" not in job.output()[0]:
            assert not await job.wait(0.02), job.output()
    return int(job.output()[0]), job


@pytest_asyncio.fixture(loop_scope="module")
async def served(boxed: Session) -> AsyncIterator[int]:
    """The port of a server inside the sandbox of `boxed`."""
    port, job = await serve(boxed)
    yield port
    await job.kill()


def own_address() -> str:
    """An address of this machine that is not loopback, empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


async def test_a_page_of_the_session_s_own_sandbox_is_reached(boxed: Session, served: int) -> None:
    for host in ("localhost", "127.0.0.1", "app.localhost", "0.0.0.0", "[::1]"):
        page = await boxed.ok("navigate", url=f"http://{host}:{served}/")
        assert page["title"] == "Inside" and "Served inside" in page["snapshot"]
    assert (await boxed.ok("click", ref=boxed.ref(page, "Again")))["url"].endswith("/again")
    assert "nothing listens on port" in await boxed.fails("navigate", url="http://localhost:18181/")


async def test_bytes_pass_unchanged_both_ways_through_the_sandbox(boxed: Session, served: int) -> None:
    await boxed.ok("navigate", url=f"http://localhost:{served}/")
    digest = """await fetch('/big').then(r => r.arrayBuffer()).then(b => crypto.subtle.digest('SHA-256', b))
      .then(d => [...new Uint8Array(d)].map(x => x.toString(16).padStart(2, '0')).join(''))"""
    assert await boxed.value(digest) == hashlib.sha256(bytes(range(256)) * 12000).hexdigest()
    sent = (
        "await fetch('/echo', {method: 'POST', body: new Uint8Array(300000).map((_, i) => i * 7)}).then(r => r.text())"
    )
    assert await boxed.value(sent) == hashlib.sha256(bytes(i * 7 & 255 for i in range(300_000))).hexdigest()


async def test_a_web_socket_into_the_sandbox_echoes(boxed: Session, served: int) -> None:
    await boxed.ok("navigate", url=f"http://localhost:{served}/")
    talk = """await new Promise((done, no) => { const ws = new WebSocket(`ws://${location.host}/ws`); const got = [];
      ws.onopen = () => { ws.send('one'); ws.send('two ü') }; ws.onerror = () => no('error');
      ws.onmessage = m => { got.push(m.data); if (got.length == 2) { ws.close(); done(got) } } })"""
    assert await boxed.value(talk) == ["one", "two ü"]


async def test_one_session_cannot_reach_another_s_sandbox(boxed: Session, served: int, worker: Worker) -> None:
    other = await worker.session(isolated=True)
    assert "nothing listens" in await other.fails("navigate", url=f"http://localhost:{served}/")
    assert (await boxed.ok("navigate", url=f"http://localhost:{served}/"))["title"] == "Inside"


async def test_no_process_is_left_in_the_sandbox_by_pages(boxed: Session, served: int) -> None:
    await boxed.ok("navigate", url=f"http://localhost:{served}/")
    await boxed.end()
    seen = await boxed.context.sandbox.exec("ps -eo args | grep -c '[d]ev/tcp' || true", timeout=10)
    assert seen.output.strip() == b"0"


REFUSED = [
    "http://10.1.2.3/",
    "http://192.168.0.1:8080/",
    "http://169.254.169.254/latest/meta-data/",
    "http://0x0a000001/",
    "http://012.1.1.1/",
    "http://167772161/",
    "http://[::ffff:10.0.0.1]/",
    "http://[fd00::1]/",
    "http://[fe80::1]/",
    "http://１０.0.0.1/",
    "http://metadata.google.internal/",
    "http://printer.local/",
    "http://user:pass@example.com/",
    "http://example.com:22/",
    "file:///etc/passwd",
    "data:text/html,<h1>x</h1>",
    "javascript:alert(1)",
    "chrome://version",
    "view-source:http://example.com/",
    "about:blank",
    "ftp://example.com/",
    "blob:http://example.com/1",
    "not a url",
    "",
]


async def test_private_addresses_and_other_schemes_are_refused_before_anything_is_asked(boxed: Session) -> None:
    for url in REFUSED:
        error = await boxed.fails("navigate", url=url)
        assert error and "ERR_" not in error, (url, error)
    assert boxed.context.state["browser"]._context is None  # the browser was not even asked


async def test_schemes_stay_refused_where_private_addresses_are_allowed(session: Session, site: Site) -> None:
    for url in ("file:///etc/passwd", "data:text/html,x", "chrome://version"):
        assert "Only http and https" in await session.fails("navigate", url=url)
    await session.ok("navigate", url=site.url("/third"))
    for url in ("file:///etc/passwd", "chrome://version"):
        await session.call("console", expression=f"location.href = '{url}'")
        assert (await session.ok("snapshot"))["url"] == site.url("/third")


async def attempt(session: Session, home: str, there: str) -> str:
    """Try from a page in every way to reach a server; what a redirect to it comes to."""
    await session.ok("navigate", url=home)
    for path in (f"http://{there}/fetch", f"/to?http://{there}/fetched"):
        await session.value(f"await fetch('{path}', {{mode: 'no-cors'}}).then(r => r.status, String)")
    sources = {"img": "src", "script": "src", "iframe": "src", "video": "src", "object": "data"}
    parts = "".join(f"<{tag} {name}='http://{there}/{tag}'></{tag}>" for tag, name in sources.items())
    parts += f"<link rel=stylesheet href=http://{there}/css><link rel=preconnect href=http://{there}>"
    await session.ok("console", expression=f"document.body.innerHTML = `{parts}`; 1")
    late = f"Object.assign(document.createElement('script'), {{src: 'http://{there}/late'}})"
    await session.ok("console", expression=f"document.head.append({late}); 1")
    await session.value(f"await new Promise(d => {{ new WebSocket('ws://{there}/ws').onerror = () => d(1) }})")
    await session.value(
        "await navigator.serviceWorker.register('/worker.js').then(() => navigator.serviceWorker.ready) && 1"
    )
    await session.ok("navigate", url=home)
    via = await session.value(f"await fetch('/viaworker?http://{there}/worker').then(r => r.text(), String)")
    assert via in ("got:opaque0", "no"), via  # the worker did ask
    await session.value(f"navigator.sendBeacon('http://{there}/beacon', 'x')")
    form = f"<form method=post action=http://{there}/form><button>Go</button></form>"
    await session.ok("console", expression=f"document.body.innerHTML = `{form}`; 1")
    await session.call("click", ref=session.ref(await session.ok("snapshot"), "Go"))
    await session.ok("navigate", url=home)
    await session.call("console", expression=f"location.href = 'http://{there}/location'")
    await session.ok("navigate", url=home)
    redirected = await session.call("navigate", url=f"{home}to?http://{there}/redirected")
    return str(redirected.get("error", ""))


ATTEMPTS = {
    *(
        "/fetch",
        "/fetched",
        "/img",
        "/iframe",
        "/video",
        "/object",
        "/css",
        "/late",
        "/ws",
        "/worker",
        "/beacon",
        "/form",
    ),
    *("/location", "/redirected"),
}


@pytest.mark.parametrize("bubblewrap", WAYS)
@pytest.mark.parametrize("browser", ["the-usual", "whole-browser"])
async def test_no_way_leads_from_a_page_to_this_machine(
    boxed: Session, served: int, bubblewrap: bool, browser: str
) -> None:
    executable = chromium.find_executable({}) if browser == "the-usual" else shutil.which("chromium")
    if executable is None or (browser == "whole-browser" and bubblewrap):
        pytest.skip("only what differs is tried: the whole browser has other flags, which matter outside of bubblewrap")
    host = BrowserHost(executable, [way for way in confinements() if way.bubblewrap == bubblewrap])
    boxed.context.shared = {"browser": host}
    target = Site("0.0.0.0")
    await target.start()
    home = f"http://localhost:{served}/"
    address = own_address() or "[::ffff:127.0.0.1]"
    assert "not a public address" in await attempt(boxed, home, f"{address}:{target.port}")
    for name in (socket.gethostname(), "[::ffff:127.0.0.1]"):
        error = await boxed.fails("navigate", url=f"{home}to?http://{name}:{target.port}/redirected")
        assert "not a public address" in error or "cannot be reached" in error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stun:
        stun.bind(("0.0.0.0", 0))
        stun.setblocking(False)
        await boxed.ok("navigate", url=home)
        rtc = f"""await (async () => {{ const c = new RTCPeerConnection({{iceServers: [
            {{urls: 'stun:{address}:{stun.getsockname()[1]}'}}]}}); c.createDataChannel('x');
          const gathered = new Promise(d => {{ c.onicecandidate = e => e.candidate || d(1); setTimeout(d, 1500) }});
          await c.setLocalDescription(); await gathered; c.close(); return 1 }})()"""
        assert await boxed.value(rtc) == 1
        with pytest.raises(BlockingIOError):
            stun.recv(100)
    assert host.confinement is not None and host.confinement.bubblewrap is bubblewrap
    assert target.hits == []
    await target.stop()
    await boxed.end()
    await host.close()


async def test_the_same_attempts_do_arrive_where_private_addresses_are_allowed(session: Session, site: Site) -> None:
    """Otherwise the test above would prove nothing."""
    port, job = await serve(session)
    assert await attempt(session, f"http://localhost:{port}/", f"127.0.0.1:{site.port}") == ""
    assert set(site.hits) >= ATTEMPTS, ATTEMPTS - set(site.hits)
    await job.kill()


async def test_a_server_that_keeps_connections_open_cannot_confuse_the_proxy(boxed: Session, served: int) -> None:
    """HTTP/1.1 with keep-alive: each request is its own connection, judged anew."""
    await boxed.ok("navigate", url=f"http://localhost:{served}/")
    many = (
        "await Promise.all([...Array(30)].map((_, i) => fetch('/' + i).then(r => r.text()))).then(t => new Set(t).size)"
    )
    assert await boxed.value(many) == 1


async def test_a_relay_ends_when_either_side_does(boxed: Session, served: int) -> None:
    tasks: set[asyncio.Task[None]] = set()
    for ask, ends in ((b"GET / HTTP/1.0\r\n\r\n", True), (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", False)):
        reader, writer = await relay.connect(boxed.context.sandbox, served, tasks)
        writer.write(ask)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        if ends:
            assert b"Served inside" in await reader.read()
        writer.close()
        async with asyncio.timeout(10):
            while tasks:
                await asyncio.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        await relay.connect(boxed.context.sandbox, 18181, tasks)


async def test_an_outlet_judges_names_by_every_address_they_have(boxed: Session) -> None:
    outlet = Outlet(boxed.context.sandbox)
    with pytest.raises(OSError, match=r"not a public address|not known|No address"):
        await outlet.open(socket.gethostname(), 80)
    assert "Only http" in outlet.judge("ws://example.com/")
    assert outlet.judge("https://example.com/") == ""
    assert outlet.judge("http://localhost:22/") == ""  # the sandbox's own
    assert outlet.judge("http://localhost.example.com.local/") != ""
