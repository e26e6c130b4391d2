"""A container engine's API at its socket: where it is, raw streams, and calls that need no event loop.

Docker Engine and Podman speak the same API; nothing here needs more than its version 1.41. `aiodocker` makes the
ordinary calls, in `docker`. The streams of attach and exec are spoken here, because a sandbox lives on them: each chunk
is handed on as it comes. Source of their format: Docker Engine API, "Attach to a container".
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlencode, urlsplit

from gristmill.config import container_hosts, container_tls
from gristmill.errors import SandboxError
from gristmill.sandbox.stream import Receiver

ANSWER_SECONDS = 20.0  # for a small question, to a busy engine too
SAID_BYTES = 2000  # of what a program says on stderr, kept for an error
WRITE_BYTES = 1 << 18  # that may wait to be sent before a writer is held up


class Address:
    """Where an engine listens: `unix:///path` or `tcp://host:port`, with TLS where the environment says so."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self.path = parts.path if parts.scheme == "unix" else ""
        self.host = parts.hostname or ""
        self.port = parts.port or 2375
        self.tls: ssl.SSLContext | None = None
        if parts.scheme not in ("unix", "tcp", "http", "https"):
            raise SandboxError(f"DOCKER_HOST={url} is not understood.", "It is unix:///path or tcp://host:port here.")
        folder = container_tls()
        if not self.path and (folder or parts.scheme == "https"):
            self.tls = ssl.create_default_context(cafile=f"{folder}/ca.pem" if folder else None)
            if folder:
                self.tls.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")

    def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, *, timeout: float = ANSWER_SECONDS
    ) -> tuple[int, Any]:
        """Status and JSON of a call, without the event loop. Raises `OSError` where the engine does not answer."""
        connection = _Connection(self, timeout)
        try:
            connection.request(method, f"{path}?{urlencode(query)}" if query else path)
            answer = connection.getresponse()
            text = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"not a container engine: {error!r}") from error
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text)
        return answer.status, text.decode(errors="replace")

    async def stream(self, path: str, body: bytes, receiver: Receiver) -> EngineStream:
        """POST, and take the connection over as a byte stream. Raises `SandboxError`."""
        loop = asyncio.get_running_loop()
        stream = EngineStream(path, body, receiver)
        try:
            if self.path:
                await loop.create_unix_connection(lambda: stream, self.path)
            else:
                await loop.create_connection(lambda: stream, self.host, self.port, ssl=self.tls)
            await stream.opened
        except OSError as error:
            raise SandboxError(f"The container engine at {self.url} does not answer: {error}.") from error
        except BaseException:
            stream.close()
            raise
        return stream


class EngineStream(asyncio.Protocol):
    """stdin of a program in a container; its stdout goes to the receiver."""

    def __init__(self, path: str, body: bytes, receiver: Receiver) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._receiver = receiver
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()  # until the stream is open: the answer; then: an incomplete frame header
        self._left = 0  # bytes of the present frame that are still to come
        self._stdout = True  # whether they are stdout
        self._said = bytearray()
        self._full: asyncio.Future[None] | None = None

    # The port.

    def write(self, data: bytes) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        if self._full:
            await asyncio.wait((self._full,))

    def write_eof(self) -> None:
        if self._transport and not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()

    def pause(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connected = self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        connected.set_write_buffer_limits(WRITE_BYTES)
        connected.write(self._request)

    def pause_writing(self) -> None:
        self._full = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._full:
            self._full.set_result(None)
            self._full = None

    def data_received(self, data: bytes) -> None:
        if not self.opened.done():
            self._head += data
            head, found, rest = bytes(self._head).partition(b"\r\n\r\n")
            if not found:
                return
            if head.split(b" ", 2)[1] not in (b"101", b"200"):
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                if length and len(rest) >= int(length[1]):
                    self.close()
                return
            self._head.clear()
            self.opened.set_result(None)
            data = rest
        self._frames(data)

    def _frames(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if not self._left:
                need = 8 - len(self._head)
                self._head += data[at : at + need]
                at += need
                if len(self._head) < 8:
                    return
                self._stdout = self._head[0] == 1
                self._left = int.from_bytes(self._head[4:])
                self._head.clear()
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._stdout:
                self._receiver.take(piece)
            elif len(self._said) < SAID_BYTES:
                self._said += piece

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.resume_writing()
        if self.opened.done():
            self._receiver.ended(self._said.decode(errors="replace").strip())
            return
        _, _, text = bytes(self._head).partition(b"\r\n\r\n")
        self.opened.set_exception(
            SandboxError(f"The container engine refused: {message(text) or error or 'no reason'}.")
        )


class _Connection(http.client.HTTPConnection):
    """HTTP to an engine, at a Unix socket too."""

    def __init__(self, address: Address, timeout: float) -> None:
        super().__init__(address.host or "engine", address.port, timeout=timeout)
        self._address = address

    def connect(self) -> None:
        if self._address.path:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._address.path)
            return
        super().connect()
        if self._address.tls:
            self.sock = self._address.tls.wrap_socket(self.sock, server_hostname=self._address.host)


def find(host: str = "") -> Address:
    """The engine at `host`, else that of this machine. Raises `SandboxError`: what was tried, and the mend."""
    tried: list[str] = []
    denied = False
    for url in (host,) if host else container_hosts():
        try:
            return _engine(url)
        except FileNotFoundError:
            tried.append(f"no socket {url.removeprefix('unix://')}")
        except OSError as error:
            denied = denied or isinstance(error, PermissionError)
            tried.append(f"{url}: {error.strerror or error}")
    start = "`systemctl start docker`, or `systemctl --user start podman.socket` for Podman"
    mend = f"Start one: {start}; or set DOCKER_HOST."
    if denied:
        mend = "You may not use that socket: `usermod -aG docker $USER` and log in again, or use a rootless engine."
    raise SandboxError(f"No container engine answers ({'; '.join(tried)}).", mend)


def find_all() -> list[Address]:
    """Every engine that answers on this machine."""
    found = []
    for url in container_hosts():
        with contextlib.suppress(OSError, SandboxError):
            found.append(_engine(url))
    return found


def _engine(url: str) -> Address:
    """An engine that answers, or `OSError`; `SandboxError` where it cannot be used."""
    address = Address(url)
    status, found = address.ask("GET", "/version")
    if status != 200 or not isinstance(found, dict):
        raise ConnectionError(f"status {status}, {message(found)}")
    if found.get("Os", "linux") != "linux":
        raise SandboxError(f"The engine at {url} runs {found['Os']} containers.", "Switch it to Linux ones.")
    return address


def message(answer: Any) -> str:
    """What an engine says in an answer that is an error."""
    if isinstance(answer, bytes):
        answer = answer.decode(errors="replace")
    if isinstance(answer, str):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, dict):
        answer = answer.get("message") or answer.get("cause") or answer
    return str(answer).strip().rstrip(".")[:SAID_BYTES]
