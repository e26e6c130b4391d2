"""Fetching: redirects, refusals, sizes, times, statuses; against real servers on loopback."""

from __future__ import annotations

import asyncio
import gzip

import aiohttp
import pytest
from aiohttp import web

from gristmill.tools.addresses import GuardedResolver, _checked_socket, guarded_session
from gristmill.tools.fetch import FetchError, fetch

from .parts import Names

LIMITS = {"limit": 1_000_000, "seconds": 5.0}


def redirect(target: str, status: int = 302):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": target})

    return handler


async def page(request: web.Request) -> web.Response:
    return web.Response(text=f"grüße, {request.headers['User-Agent']}", content_type="text/plain", charset="latin-1")


@pytest.fixture
async def private():
    async with guarded_session(True) as session:
        yield session


async def test_follows_redirects_and_says_where_it_ended(serve, private) -> None:
    server = await serve(
        {"/a": redirect("/b", 301), "/b": redirect("c?x=1#part", 307), "/c": page, "/d": redirect("//{}/c", 308)}
    )
    found = await fetch(private, str(server.make_url("/a")), allow_private=True, **LIMITS)
    assert found.url == str(server.make_url("/c?x=1"))
    assert found.body.decode("latin-1").startswith("grüße, Mozilla/5.0 (compatible; gristmill)")
    assert (found.content_type, found.charset) == ("text/plain", "latin-1")


async def test_gives_up_on_a_redirect_loop(serve, private) -> None:
    server = await serve({"/a": redirect("/b"), "/b": redirect("/a")})
    with pytest.raises(FetchError, match="More than 10 redirects"):
        await fetch(private, str(server.make_url("/a")), allow_private=True, **LIMITS)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("file:///etc/passwd", "not file ones"),
        ("data:text/plain,secret", "not data ones"),
        ("javascript:alert(1)", "not javascript ones"),
        ("http://user:pass@example.org/", "user name"),
        ("http://[::1", "not a URL|failed"),
        ("", "without a place"),
    ],
)
async def test_a_redirect_to_something_else_is_refused_even_with_private_addresses_allowed(
    serve, private, target: str, reason: str
) -> None:
    server = await serve({"/": redirect(target)})
    with pytest.raises(FetchError, match=reason):
        await fetch(private, str(server.make_url("/")), allow_private=True, **LIMITS)


class Opened(GuardedResolver):
    """Lets the names of `front` through, as if their loopback address were public; judges all others."""

    async def resolve(self, host, port=0, family=0):
        if host == "front.example":
            return await self._inner.resolve(host, port, family)
        return await super().resolve(host, port, family)


def public_looking(port: int, names: Names) -> aiohttp.ClientSession:
    """A guarded client for which exactly one loopback port counts as a public server."""

    def sockets(info):
        import socket

        return socket.socket(*info[:3]) if info[4][1] == port else _checked_socket(info)

    connector = aiohttp.TCPConnector(resolver=Opened(names), socket_factory=sockets)
    return aiohttp.ClientSession(connector=connector)


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/secret",
        "http://localhost:{port}/secret",
        "http://2130706433:{port}/secret",
        "http://0x7f.1:{port}/secret",
        "http://017700000001:{port}/secret",
        "http://[::1]:{port}/secret",
        "http://[::ffff:127.0.0.1]:{port}/secret",
        "http://169.254.169.254/latest/meta-data/",
        "//127.0.0.1:{port}/secret",
        "http://back.example:{port}/secret",  # a name that resolves to a private address
    ],
)
async def test_a_public_page_cannot_redirect_into_a_private_network(serve, target: str) -> None:
    reached = []

    async def secret(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(text="secret")

    inside = await serve({"/*": secret})
    outside = await serve({"/": redirect(target.format(port=inside.port))})
    names = Names(front=[["127.0.0.1"]], back=[["127.0.0.1"]])
    async with public_looking(outside.port, names) as session:
        with pytest.raises(FetchError, match=r"only public addresses"):
            await fetch(session, f"http://front.example:{outside.port}/", **LIMITS)
    assert reached == []


async def test_a_redirect_between_public_places_is_followed(serve) -> None:
    outside = await serve({"/": redirect("/on"), "/on": page})
    async with public_looking(outside.port, Names(front=[["127.0.0.1"]])) as session:
        found = await fetch(session, f"http://front.example:{outside.port}/", **LIMITS)
    assert found.url == f"http://front.example:{outside.port}/on"


async def test_an_address_is_refused_before_anything_is_sent(serve) -> None:
    server = await serve({"/": page})
    async with guarded_session(False, resolver=Names(trap=[["10.0.0.1", "127.0.0.1"]])) as session:
        for host in ("127.0.0.1", "trap.example"):
            with pytest.raises(FetchError, match=r"127\.0\.0\.1|10\.0\.0\.1"):
                await fetch(session, f"http://{host}:{server.port}/", **LIMITS)


async def test_statuses_and_lost_connections(serve, private) -> None:
    async def gone(request: web.Request) -> web.Response:
        return web.Response(status=410, reason="Gone")

    async def cut(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "100"})
        await answer.prepare(request)
        await answer.write(b"half")
        request.transport.close()
        return answer

    server = await serve({"/gone": gone, "/cut": cut})
    url = str(server.make_url("/gone"))
    with pytest.raises(FetchError, match=r"^HTTP 410 Gone\.$"):
        await fetch(private, url, allow_private=True, **LIMITS)
    with pytest.raises(FetchError, match="The request failed"):
        await fetch(private, str(server.make_url("/cut")), allow_private=True, **LIMITS)
    await server.close()
    with pytest.raises(FetchError, match="Cannot connect"):
        await fetch(private, url, allow_private=True, **LIMITS)


async def test_a_body_is_bounded_by_what_it_says_by_what_it_is_and_by_what_it_unpacks_to(serve, private) -> None:
    async def says(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 2_000)

    async def streams(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(2_000):  # two gigabytes, if it were read
            await answer.write(b"x" * 1_000_000)
        return answer

    async def bomb(request: web.Request) -> web.Response:
        packed = gzip.compress(b"\0" * 20_000_000)
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    server = await serve({"/says": says, "/streams": streams, "/bomb": bomb})
    for path in ("/says", "/streams", "/bomb"):
        with pytest.raises(FetchError, match="larger than 1,000 bytes"):
            await fetch(private, str(server.make_url(path)), limit=1_000, seconds=5, allow_private=True)
    small = gzip.compress(b"y" * 900)
    assert len(small) < 900
    found = await fetch(private, str(server.make_url("/says")), limit=2_000, seconds=5, allow_private=True)
    assert len(found.body) == 2_000


async def test_time_is_bounded_over_headers_body_and_redirects_together(serve, private) -> None:
    async def drips(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b".")
            await asyncio.sleep(0.02)

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        raise web.HTTPFound("/slow")

    server = await serve({"/drips": drips, "/slow": slow})
    for path in ("/drips", "/slow"):
        started = asyncio.get_running_loop().time()
        with pytest.raises(FetchError, match=r"within 0\.5 seconds"):
            await fetch(private, str(server.make_url(path)), limit=10_000, seconds=0.5, allow_private=True)
        assert asyncio.get_running_loop().time() - started < 4
