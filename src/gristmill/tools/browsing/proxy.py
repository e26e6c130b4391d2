"""The only way from a page to a network: a small HTTP proxy in the worker that judges every connection.

Chromium is told to send everything through it: documents and their parts, fetch, service workers, WebSockets. An
`Outlet` is one session's way out; its proxy address is its own, and so tells which session a connection is from.

Of each connection the host is judged as it is written, then all its addresses, and one of those very addresses is
connected to. So redirects, names that change their address and pages that attack the local network all meet the same
rule. `localhost` of a session whose sandbox is isolated is the sandbox itself, reached through `relay`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gristmill.sandbox.base import Sandbox
from gristmill.tools.addresses import RESOLVE_SECONDS, AddressRefused, check_url, is_public, literal_address
from gristmill.tools.browsing import relay

HEAD_LIMIT = 65_536  # bytes of a request's or an answer's head
HEAD_SECONDS = 120.0  # for a request on an open connection; browsers open some ahead
CONNECT_SECONDS = 20.0
FAILURES_LIMIT = 50  # hosts of which is remembered why they could not be reached
BYTES_LIMIT = 512 * 2**20  # of one connection, each way
REASON_HEADER = "x-gristmill-proxy"  # of answers that the proxy itself gives: "refused" or "unreachable"

_HOP_HEADERS = (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", REASON_HEADER.encode())


@dataclass(eq=False)
class _Traffic:
    """When a connection last asked and was last answered (`time.monotonic()`)."""

    asked: float
    answered: float = 0.0


@dataclass(eq=False)
class Outlet:
    """One session's way out.

    Args:
        sandbox: the session's.
        allow_private: lifts the rule about addresses.

    """

    sandbox: Sandbox
    allow_private: bool = False
    _failed: dict[str, str] = field(default_factory=dict)  # host:port → why no connection could be made the last time
    _traffic: set[_Traffic] = field(default_factory=set)
    _answer: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def judge(self, url: str) -> str:
        """Why this URL is refused, empty where nothing in its text speaks against it."""
        inside = self._is_inside(urlsplit(url).hostname or "") if url.isprintable() else False
        return check_url(url, allow_private=self.allow_private or inside)

    async def open(self, host: str, port: int) -> relay.Streams:
        """A connection. Raises `AddressRefused`, or another OSError where it cannot be made."""
        if self._is_inside(host):
            try:
                return await relay.connect(self.sandbox, port, self._tasks)
            except ConnectionRefusedError:
                if not self.allow_private:
                    raise
        written = f"[{host}]" if ":" in host else host
        refusal = check_url(f"http://{written}:{port}/", allow_private=self.allow_private)
        if refusal:
            raise AddressRefused(refusal)
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for *_, address in found]
        private = [address for address in addresses if not is_public(address)]
        if private and not self.allow_private:
            raise AddressRefused(
                f"{host} ({private[0]}) is not a public address; only public addresses can be reached."
            )
        return await _first_open(addresses, port)

    def why_failed(self, url: str) -> str:
        """Why the last connection for this https URL could not be made, empty where it could."""
        parts = urlsplit(url)
        return self._failed.get(f"{parts.hostname}:{parts.port or 443}", "")

    def note(self, host: str, port: int, reason: str) -> None:
        """Remember why a connection could not be made, or with an empty reason that it could."""
        self._failed.pop(f"{host}:{port}", "")
        if reason:
            self._failed[f"{host}:{port}"] = reason
            if len(self._failed) > FAILURES_LIMIT:
                del self._failed[next(iter(self._failed))]

    async def answered(self, since: float) -> None:
        """Wait until nothing that was asked since that `time.monotonic()` is without an answer."""
        while any(traffic.asked >= since and traffic.asked > traffic.answered for traffic in self._traffic):
            self._answer.clear()
            await self._answer.wait()

    def hear(self, traffic: _Traffic) -> None:
        """Note that a connection was answered."""
        traffic.answered = time.monotonic()
        self._answer.set()

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10)

    def _is_inside(self, host: str) -> bool:
        if not self.sandbox.capabilities.isolated:
            return False
        name = host.lower().rstrip(".")
        if name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = literal_address(name)
        except ValueError:
            return False
        return address is not None and (address.is_loopback or address.is_unspecified)


async def _first_open(addresses: list[str], port: int) -> relay.Streams:
    error: OSError = OSError("no address")
    for address in dict.fromkeys(addresses):
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await asyncio.open_connection(address, port, limit=HEAD_LIMIT)
        except TimeoutError:
            error = OSError(f"no answer from {address}")
        except OSError as failed:
            error = failed
    raise error


class Proxy:
    """The listening side: takes connections and gives each to the outlet whose address it came to."""

    def __init__(self) -> None:
        self._outlets: dict[tuple[str, int], Outlet] = {}
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._shared: tuple[asyncio.Server, int] | None = None
        self._numbers = itertools.count(2)

    async def listen(self, listener: socket.socket | None) -> None:
        """Serve one socket that is reached at every loopback address (of the browser's network); None: each its own.

        Outlets admitted before are forgotten.
        """
        await self.close()
        if listener is not None:
            server = await asyncio.start_server(self._serve, sock=listener, limit=HEAD_LIMIT)
            self._shared = server, listener.getsockname()[1]

    async def admit(self, outlet: Outlet) -> str:
        """The proxy URL of this outlet from now on."""
        if self._shared is not None:
            number = next(self._numbers)
            place = f"127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", self._shared[1]
        else:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_LIMIT)
            place = "127.0.0.1", server.sockets[0].getsockname()[1]
            self._servers[place] = server
        self._outlets[place] = outlet
        return f"http://{place[0]}:{place[1]}"

    async def dismiss(self, outlet: Outlet) -> None:
        """Take no more connections for this outlet and end those it has; idempotent."""
        for place in [place for place, known in self._outlets.items() if known is outlet]:
            del self._outlets[place]
            if server := self._servers.pop(place, None):
                server.close()
        await outlet.close()

    async def close(self) -> None:
        """End everything; idempotent."""
        if self._shared is not None:
            self._shared[0].close()
            self._shared = None
        for outlet in set(self._outlets.values()):
            await self.dismiss(outlet)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = writer.get_extra_info("sockname") or ()  # none where the connection is gone already
        outlet = self._outlets.get(tuple(place[:2]))
        task = asyncio.current_task()
        try:
            if outlet is None or task is None:
                return
            outlet._tasks.add(task)
            await _answer(outlet, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the connection is over, for whatever reason
        except asyncio.CancelledError:
            pass  # only `Outlet.close` cancels, and it waits for this end
        finally:
            if outlet is not None and task is not None:
                outlet._tasks.discard(task)
            writer.close()


async def _answer(outlet: Outlet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request: a tunnel (CONNECT), or one exchange over plain HTTP."""
    async with asyncio.timeout(HEAD_SECONDS):
        head = await reader.readuntil(b"\r\n\r\n")
    line, _, headers = head.partition(b"\r\n")
    method, target, version = _split_line(line)
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError:
        host, port = "", 0
    if not host or (method != "CONNECT" and parts.scheme != "http"):
        writer.write(_own_answer("400 Bad Request", "refused", "Only http and https can be reached."))
        return
    traffic = _Traffic(asked=time.monotonic())
    outlet._traffic.add(traffic)
    try:
        try:
            far_reader, far_writer = await outlet.open(host, port)
        except AddressRefused as error:
            outlet.note(host, port, str(error))
            writer.write(_own_answer("403 Forbidden", "refused", str(error)))
            return
        except (OSError, UnicodeError) as error:
            reason = f"{host}:{port} cannot be reached: {error or 'no answer in time'}."
            outlet.note(host, port, reason)
            writer.write(_own_answer("502 Bad Gateway", "unreachable", reason))
            return
        outlet.note(host, port, "")
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                outlet.hear(traffic)
            else:
                far_writer.write(f"{method} {_path(target)} {version}\r\n".encode("latin-1") + _own_headers(headers))
                traffic.asked = time.monotonic()
            await _carry(outlet, traffic, (reader, writer), (far_reader, far_writer), plain=method != "CONNECT")
        finally:
            far_writer.close()
    finally:
        outlet._traffic.discard(traffic)
        outlet._answer.set()


async def _carry(outlet: Outlet, traffic: _Traffic, near: relay.Streams, far: relay.Streams, *, plain: bool) -> None:
    """Pass bytes both ways until one side ends."""
    reader, writer = near
    far_reader, far_writer = far

    async def up() -> None:
        total = 0
        talks = False  # a WebSocket in the clear: what it says later need not have an answer
        while (data := await reader.read(65_536)) and (total := total + len(data)) <= BYTES_LIMIT:
            far_writer.write(data)
            if not talks:
                traffic.asked = time.monotonic()
                talks = not plain and data.startswith(b"GET ")
            await far_writer.drain()

    async def down() -> None:
        total = 0
        if plain:
            # The browser must not send a second request on this connection: it was opened for one host.
            while True:
                status, _, headers = (await far_reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
                writer.write(status + b"\r\n" + _own_headers(headers))
                if not status.split(b" ", 1)[-1].startswith(b"1"):
                    break
            outlet.hear(traffic)
        while (data := await far_reader.read(65_536)) and (total := total + len(data)) <= BYTES_LIMIT:
            writer.write(data)
            outlet.hear(traffic)
            await writer.drain()

    ways = [asyncio.create_task(up()), asyncio.create_task(down())]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            way.result()
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


def _split_line(line: bytes) -> tuple[str, str, str]:
    """Method, target and version of a request line; empty target where it is none."""
    words = line.decode("latin-1").split(" ")
    return (words[0], words[1], words[2]) if len(words) == 3 else ("", "", "")


def _path(url: str) -> str:
    """Path and query of an absolute URL, exactly as they are written."""
    rest = url.partition("://")[2]
    start = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
    path = rest[start:]
    return path if path.startswith("/") else f"/{path}"


def _own_headers(headers: bytes) -> bytes:
    """Header lines without those of one connection only, and with the end of this one announced."""
    kept = [line for line in headers.split(b"\r\n") if line and line.split(b":", 1)[0].lower() not in _HOP_HEADERS]
    return b"\r\n".join([*kept, b"Connection: close", b"", b""])


def _own_answer(status: str, kind: str, reason: str) -> bytes:
    body = reason.encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        f"{REASON_HEADER}: {kind}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
