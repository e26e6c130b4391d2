"""HTTP to one endpoint: one aiohttp session per worker, bounded in time and size, the key for its host only."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from gristmill.config import is_loopback
from gristmill.errors import ErrorKind, ModelError
from gristmill.model import classify

MAX_BODY = 64 * 1024 * 1024  # bytes of one answer
MAX_ERROR_BODY = 64 * 1024  # bytes of an error that are looked at


@dataclass(frozen=True)
class Timeouts:
    """Seconds: to connect, of a whole call, and between two pieces of a stream."""

    connect: float = 30.0
    total: float = 600.0
    idle: float = 120.0


class Transport:
    """Posts JSON to one base URL. Made anywhere, used in one event loop.

    No cookies are kept and no redirect is followed, so the key cannot leave its host. A proxy of the environment
    (`HTTPS_PROXY` …) is used for remote hosts as everywhere; loopback never goes through one.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], *, timeouts: Timeouts | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers)
        self._timeouts = timeouts or Timeouts()
        self._proxy = _proxy_for(base_url)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes) -> bytes:
        """The body of a successful answer. Raises `ModelError` for everything else."""
        begun = time.monotonic()
        try:
            async with self._request("POST", path, body, idle=None) as response:
                if response.status >= 300:
                    raise await self._refusal(response)
                return await _read(response, MAX_BODY)
        except (aiohttp.ClientError, OSError) as error:
            raise classify.from_exception(error, seconds=time.monotonic() - begun) from error

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event, as it comes; the whole body where the server did not stream after all."""
        begun = time.monotonic()
        try:
            async with self._request("POST", path, body, idle=self._timeouts.idle) as response:
                if response.status >= 300:
                    raise await self._refusal(response)
                if "event-stream" not in response.headers.get("Content-Type", "event-stream"):
                    yield await _read(response, MAX_BODY)
                    return
                async for data in _events(response.content):
                    yield data
        except (aiohttp.ClientError, OSError) as error:
            raise classify.from_exception(error, seconds=time.monotonic() - begun) from error

    async def get(self, path: str, *, seconds: float = 10.0) -> tuple[int, bytes]:
        """(status, body) of a GET, whatever the status. Raises `ModelError` where there is no answer."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(seconds), self._request("GET", path, None, idle=None) as response:
                return response.status, await _read(response, MAX_BODY)
        except (aiohttp.ClientError, OSError) as error:
            raise classify.from_exception(error, seconds=time.monotonic() - begun) from error

    async def close(self) -> None:
        """Close all connections; idempotent."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _request(
        self, method: str, path: str, body: bytes | None, *, idle: float | None
    ) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Concurrency is bounded by the sessions and the limiter; a second bound here would only hide queueing.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0, ttl_dns_cache=300),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
            )
        limits = self._timeouts
        return self._session.request(
            method,
            self.base_url + path,
            data=body,
            allow_redirects=False,
            proxy=self._proxy,
            timeout=aiohttp.ClientTimeout(total=limits.total, sock_connect=limits.connect, sock_read=idle),
        )

    async def _refusal(self, response: aiohttp.ClientResponse) -> ModelError:
        body = await response.content.read(MAX_ERROR_BODY)
        return classify.classify(response.status, body, response.headers)


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise ModelError(f"an answer of more than {limit} bytes", ErrorKind.MALFORMED, status=response.status)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events (WHATWG HTML §9.2.6): comments and other fields are passed over."""
    rest = b""
    data: list[bytes] = []
    size = 0
    async for piece in content.iter_any():
        size += len(piece)
        if size > MAX_BODY:
            raise ModelError(f"a stream of more than {MAX_BODY} bytes", ErrorKind.MALFORMED, status=200)
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip())
    if data:
        yield b"\n".join(data)


def _proxy_for(url: str) -> str | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)
