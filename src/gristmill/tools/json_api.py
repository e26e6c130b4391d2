"""One JSON request to a tool's provider: bounded, retried a little, never redirected, its key kept out of errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from gristmill.tools.fetch import FetchError, read_bounded

TRIES = 3
SECONDS = 30.0  # of one try
LONGEST_WAIT = 20.0  # seconds that a Retry-After is honoured for
ANSWER_LIMIT = 10_000_000  # bytes
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})


class ApiError(Exception):
    """The provider failed.

    Args:
        message: host, status and a bounded piece of what it said; never a key.
        status: HTTP status, 0 where there was none.
        transient: the same request may work later.
        wait: seconds it asked to wait, 0 where it did not.
    """

    def __init__(self, message: str, *, status: int = 0, transient: bool = False, wait: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.transient = transient
        self.wait = wait


async def ask_json(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    body: Any = None,
    seconds: float = SECONDS,
    tries: int = TRIES,
    limit: int = ANSWER_LIMIT,
) -> Any:
    """Send `body` as JSON and return the decoded answer of a 2xx.

    Transient failures (408, 409, 425, 429, 5xx, a lost connection, an answer that is not JSON) are tried again with
    exponential backoff, jitter and `Retry-After`, others never. Redirects are failures: a key goes to no other host.

    Raises:
        ApiError: with everything that header values of 8 characters or more say blotted out.
    """
    for attempt in range(1, tries + 1):
        try:
            return await _once(session, method, url, headers or {}, params, body, seconds, limit)
        except ApiError as error:
            if not error.transient or attempt == tries or error.wait > LONGEST_WAIT:
                raise
            backoff = 0.5 * 2**attempt * (0.5 + random.random())  # 0.5 to 1.5 s, then 1 to 3 s
            await asyncio.sleep(error.wait or backoff)
    raise AssertionError("unreachable: the last try returns or raises")


async def _once(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    params: Mapping[str, str] | None,
    body: Any,
    seconds: float,
    limit: int,
) -> Any:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise ApiError(f"{url} is not a usable http address.")
    host = parts.netloc.rpartition("@")[2]
    data = None if body is None else orjson.dumps(body)
    try:
        async with asyncio.timeout(seconds):
            async with session.request(
                method,
                url,
                headers=headers if data is None else {**headers, "Content-Type": "application/json"},
                params=params,
                data=data,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as answer:
                raw = await read_bounded(answer, limit)
    except TimeoutError:
        raise ApiError(f"{host} did not answer within {seconds:g} seconds.", transient=True) from None
    except FetchError as error:
        raise ApiError(f"The answer of {host} cannot be used: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        raise ApiError(f"{host} cannot be reached: {reason or type(error).__name__}.", transient=True) from None

    if not 200 <= answer.status < 300:
        said = _blot(_what_it_says(raw), headers)
        raise ApiError(
            f"{host} answered HTTP {answer.status}{': ' + said if said else ''}.",
            status=answer.status,
            transient=answer.status in _TRANSIENT,
            wait=_retry_after(answer.headers.get("Retry-After", "")),
        )
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ApiError(f"{host} answered something that is not JSON.", status=answer.status, transient=True) from None


def error_text(data: Any) -> str:
    """What an error body says, in the usual spellings: `error`, `error.message`, `message`, `detail`; empty if none."""
    if isinstance(data, str):
        return data
    if isinstance(data, list):
        return "; ".join(filter(None, map(error_text, data[:3])))
    if isinstance(data, dict):
        for key in ("error", "message", "detail", "msg"):
            if found := error_text(data.get(key)):
                return found
    return ""


def _what_it_says(raw: bytes) -> str:
    try:
        said = error_text(orjson.loads(raw))
    except orjson.JSONDecodeError:
        said = "" if raw.lstrip()[:1] == b"<" else raw[:1_000].decode("utf-8", "replace")
    return " ".join(said.split())[:300].rstrip(".")


def _blot(text: str, headers: Mapping[str, str]) -> str:
    for value in headers.values():
        for secret in (value, value.rpartition(" ")[2]):
            if len(secret) >= 8:
                text = text.replace(secret, "[key]")
    return text


def _retry_after(value: str) -> float:
    """Seconds; a date counts as none."""
    try:
        return max(0.0, float(value))
    except ValueError:
        return 0.0
