"""The address rules: what a URL says, what a name resolves to, and what a socket connects to."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tools.addresses import (
    AddressRefused,
    GuardedResolver,
    _checked_socket,
    check_url,
    guarded_session,
    is_public,
    literal_address,
    resolve_and_check,
)

from .parts import Names

PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",  # most clouds' metadata
    "100.100.100.200",  # Alibaba's
    "192.0.0.192",  # Oracle's
    "168.63.129.16",  # Azure's
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",  # Amazon's metadata
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "3fff::1",
    "2001::1",  # Teredo
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::7f00:1",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "2002:a9fe:a9fe::1",
    "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
]
PUBLIC = [
    "1.1.1.1",
    "93.184.216.34",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700:4700::1111",
    "2a00:1450:4001::1",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_not_public(address: str) -> None:
    assert not is_public(address)
    host = f"[{address}]" if ":" in address else address
    assert check_url(f"http://{host}/")
    assert not check_url(f"http://{host}/", allow_private=True) or "%" in address


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert is_public(address)
    host = f"[{address}]" if ":" in address else address
    assert check_url(f"https://{host}:8443/a?b#c") == ""


@given(st.ip_addresses())
def test_public_addresses_are_global_for_the_standard_library_too(address: IPv4Address | IPv6Address) -> None:
    holds_ipv4 = isinstance(address, IPv6Address) and (address.sixtofour or address in IPv6Network("::/3"))
    if is_public(address) and not holds_ipv4:
        assert address.is_global and not address.is_multicast and not address.is_reserved


def spellings(address: IPv4Address) -> st.SearchStrategy[str]:
    """Every way in which inet_aton lets an address be written."""
    value = int(address)
    number = st.sampled_from(("{}", "0{:o}", "0x{:x}", "0X{:X}", "00{:o}", "0x0{:x}"))

    def parts(count: int) -> list[int]:
        head = [value >> 8 * (3 - i) & 255 for i in range(count - 1)]
        return [*head, value & (256 ** (5 - count) - 1)]

    def write(drawn: tuple[int, list[str], str]) -> str:
        count, forms, dot = drawn
        text = ".".join(form.format(part) for form, part in zip(forms, parts(count), strict=False))
        return text.replace(".", dot)

    return st.tuples(st.integers(1, 4), st.lists(number, min_size=4, max_size=4), st.sampled_from(".。")).map(write)


@given(st.data(), st.ip_addresses(v=4))
def test_every_spelling_of_an_ipv4_address_is_seen_through(data: st.DataObject, address: IPv4Address) -> None:
    text = data.draw(spellings(address))
    wide = data.draw(st.booleans())
    host = "".join(chr(ord(c) + 0xFEE0) if wide and c.isdigit() else c for c in text)
    assert (check_url(f"http://{host}/") == "") == is_public(address), host
    plain = text.lower().replace("。", ".")
    assert literal_address(plain) == address
    assert socket.inet_aton(plain) == address.packed  # what the system's resolver would make of it


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_inside_an_ipv6_one_is_judged_itself(address: IPv4Address) -> None:
    for inside in (f"::ffff:{address}", str(ip_address(0x2002 << 112 | int(address) << 80)), f"64:ff9b::{address}"):
        assert is_public(inside) == is_public(address)


@given(st.text(max_size=40))
def test_any_text_gets_an_answer(text: str) -> None:
    for url in (text, f"http://{text}", f"http://{text}/", f"https://example.org{text}"):
        assert isinstance(check_url(url), str)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "data:text/html,<h1>x",
        "javascript:alert(1)",
        "ftp://example.org/",
        "gopher://example.org/",
        "ws://example.org/",
        "//example.org/",
        "example.org",
        "",
        "http://",
        "http:///etc/passwd",
        "http://user@example.org/",
        "http://user:secret@example.org/",
        "http://example.org:secret@127.0.0.1/",
        "http://:@example.org/",
        "http://example.org\\@127.0.0.1/",
        "http://example.org/\r\nHost: x",
        "http://exa\tmple.org/",
        "http://127%2e0.0.1/",
        "http://127.0.0.1%00.example.org/",
        "http://[::1/",
        "http://[::1%25lo]/",
        "http://[127.0.0.1]/",
        "http://localhost/",
        "http://LOCALHOST./",
        "http://a.localhost:8080/",
        "http://ⓛocalhost/",
        "http://local\u00adhost/",
        "http://printer.local/",
        "http://metadata.google.internal/",
        "http://localhost.localdomain/",
        "http://127.1/",
        "http://0x7f000001/",
        "http://017700000001/",
        "http://2130706433/",
        "http://127.0.0.1./",
        "http://1.2.3.4.5/",
        "http://256.1.1.1/",
        "http://example.09/",
        "http://a..b/",
        "http://exa mple.org/",
        "http://example.org:0/",
        "http://example.org:22/",
        "http://example.org:65536/",
        "http://example.org:x/",
        "http://" + "a" * 9000,
    ],
)
def test_refused(url: str) -> None:
    refusal = check_url(url)
    assert refusal.endswith(".")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org",
        "HTTPS://Example.ORG./path?q=127.0.0.1#localhost",
        "https://example.org:8443/",
        "https://münchen.example/straße",
        "https://xn--mnchen-3ya.example/",
        "https://under_score.example.org/",
        "https://localhost.example.org/",
        "https://127.0.0.1.nip.io/",  # a name; refused once it is resolved
        "https://example.org/a b",
        "https://1e100.net/",
    ],
)
def test_nothing_speaks_against_it(url: str) -> None:
    assert check_url(url) == ""


def test_allowing_private_addresses_allows_neither_other_schemes_nor_user_names() -> None:
    assert check_url("http://127.0.0.1:81/", allow_private=True) == ""
    assert check_url("http://localhost/", allow_private=True) == ""
    assert check_url("file:///etc/passwd", allow_private=True)
    assert check_url("http://me:secret@localhost/", allow_private=True)


async def test_resolving_a_name_of_this_machine_is_refused() -> None:
    assert "127.0.0.1" in await resolve_and_check("localhost") or "::1" in await resolve_and_check("localhost")
    assert "not a public address" in await resolve_and_check("2130706433")
    assert "not a public address" in await resolve_and_check("[::1]")
    assert await resolve_and_check("localhost", allow_private=True) == ""
    assert await resolve_and_check("1.1.1.1") == ""
    assert "cannot be resolved" in await resolve_and_check("no-such-host.invalid")


async def test_the_resolver_gives_public_addresses_only() -> None:
    names = Names(mixed=[["10.0.0.1", "93.184.216.34", "::1", "2606:4700::1"]], inner=[["10.0.0.1", "fd00::1"]])
    resolver = GuardedResolver(names)
    found = await resolver.resolve("mixed.example", 80)
    assert [entry["host"] for entry in found] == ["93.184.216.34", "2606:4700::1"]
    with pytest.raises(AddressRefused, match=r"inner\.example \(10\.0\.0\.1\) is not a public address"):
        await resolver.resolve("inner.example", 80)


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def refusal_of(session: aiohttp.ClientSession, url: str) -> str:
    with pytest.raises(aiohttp.ClientConnectorError) as caught:
        await session.get(url)
    assert isinstance(caught.value.os_error, AddressRefused)
    return str(caught.value.os_error)


async def test_no_connection_to_a_name_that_resolves_to_a_private_address(serve) -> None:
    server = await serve({"/": hello})
    async with guarded_session(False, resolver=Names(trap=[["127.0.0.1"]])) as session:
        assert "127.0.0.1" in await refusal_of(session, f"http://trap.example:{server.port}/")
    async with (
        guarded_session(True, resolver=Names(trap=[["127.0.0.1"]])) as session,
        session.get(f"http://trap.example:{server.port}/") as answer,
    ):
        assert await answer.text() == "hello"


async def test_no_connection_to_a_literal_address_which_no_resolver_sees(serve) -> None:
    server = await serve({"/": hello})
    names = Names()
    async with guarded_session(False, resolver=names) as session:
        for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"):
            assert "not a public address" in await refusal_of(session, f"http://{host}:{server.port}/")
    assert names.asked == []


async def test_a_redirect_that_the_client_follows_itself_is_refused_at_the_socket(serve) -> None:
    # Even if a caller forgot to check each hop: the rule stands at the connection, not in the caller.
    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/secret")

    server = await serve({"/": away})
    refused = []

    class Hole(GuardedResolver):  # lets the first name through, as if its address were public
        async def resolve(self, host, port=0, family=socket.AF_INET):
            return await self._inner.resolve(host, port, family)

    def sockets(info):
        if info[4][1] == server.port:
            return socket.socket(*info[:3])
        refused.append(info[4][0])
        return _checked_socket(info)

    connector = aiohttp.TCPConnector(resolver=Hole(Names(start=[["127.0.0.1"]])), socket_factory=sockets)
    async with aiohttp.ClientSession(connector=connector) as session:
        await refusal_of(session, f"http://start.example:{server.port}/")
    assert refused == ["127.0.0.1"]


async def test_a_name_that_changes_its_mind_is_caught_at_the_socket() -> None:
    """DNS rebinding: the resolver was fooled, the address of the socket is judged all the same."""

    class Fooled(GuardedResolver):
        async def resolve(self, host, port=0, family=socket.AF_INET):
            await super().resolve(host, port, family)  # public when it was checked …
            return await self._inner.resolve(host, port, family)  # … private when it is used

    names = Names(turncoat=[["93.184.216.34"], ["127.0.0.1"]])
    async with guarded_session(False, resolver=names) as session:
        session.connector._resolver = Fooled(names)
        assert "127.0.0.1 is not a public address" in await refusal_of(session, "http://turncoat.example:9/")
