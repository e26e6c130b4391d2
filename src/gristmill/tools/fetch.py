"""One GET of a page or a picture, with every redirect checked and size and time bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from yarl import URL

from gristmill.tools.addresses import AddressRefused, check_url

MAX_REDIRECTS = 10
# Named like a browser, since many servers answer others with an error, and honest about who it is.
USER_AGENT = "Mozilla/5.0 (compatible; gristmill)"


class FetchError(Exception):
    """The page or picture could not be had; the text says why, fit for a model to read."""


@dataclass(frozen=True)
class Fetched:
    """An answer. `url` is where it came from in the end; `content_type` is lower case without parameters."""

    url: str
    body: bytes
    content_type: str = ""
    charset: str = ""


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    *,
    limit: int,
    seconds: float,
    allow_private: bool = False,
    accept: str = "*/*",
    redirects: int = MAX_REDIRECTS,
) -> Fetched:
    """Get a URL, following redirects.

    Args:
        session: made by `addresses.guarded_session`, which checks the address of every connection.
        limit: most bytes of the body, after decompression.
        seconds: wall time for everything together.
        redirects: most that are followed.

    Raises:
        FetchError: a refused address, no answer, an HTTP error status, a body that is too large.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _follow(session, url, limit, allow_private, accept, redirects)
    except TimeoutError:
        raise FetchError(f"No complete answer within {seconds:g} seconds.") from None
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, AddressRefused):
            raise FetchError(str(error.os_error)) from None
        raise FetchError(f"Cannot connect: {error.os_error}.") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise FetchError(f"The request failed: {error or type(error).__name__}.") from None


async def _follow(
    session: aiohttp.ClientSession, url: str, limit: int, allow_private: bool, accept: str, redirects: int
) -> Fetched:
    for _ in range(redirects + 1):
        refusal = check_url(url, allow_private=allow_private)
        if refusal:
            raise FetchError(refusal)
        async with session.get(
            url,
            allow_redirects=False,
            headers={"User-Agent": USER_AGENT, "Accept": accept},
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            if answer.status in (301, 302, 303, 307, 308):
                target = answer.headers.get("Location", "")
                if not target:
                    raise FetchError(f"HTTP {answer.status} without a place to go to.")
                url = str(answer.url.join(URL(target)))
                continue
            if answer.status >= 400:
                raise FetchError(f"HTTP {answer.status} {answer.reason or ''}".rstrip() + ".")
            body = await read_bounded(answer, limit)
            return Fetched(
                url=str(answer.url),
                body=body,
                content_type=answer.content_type if "Content-Type" in answer.headers else "",
                charset=answer.charset or "",
            )
    raise FetchError(f"More than {redirects} redirects.")


async def read_bounded(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, of at most `limit` bytes after decompression. Raises `FetchError` as soon as it is longer."""
    if (answer.content_length or 0) > limit and "Content-Encoding" not in answer.headers:
        raise FetchError(f"It is larger than {limit:,} bytes.")
    chunks: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_chunked(65_536):
        size += len(chunk)
        if size > limit:
            raise FetchError(f"It is larger than {limit:,} bytes.")
        chunks.append(chunk)
    return b"".join(chunks)
