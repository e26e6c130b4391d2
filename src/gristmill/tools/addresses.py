"""Which addresses a session's tools may reach: the public internet over http and https, nothing else.

A URL is judged three times, because each judgement alone can be got round:
- `check_url` reads the URL itself: scheme, user info, port, and hosts that are addresses in any spelling that
  resolvers accept (decimal, octal, hexadecimal, shortened, IPv6 with an IPv4 inside, full-width digits).
- `GuardedResolver` drops every non-public address that a name resolves to.
- `guarded_session` checks the address of each socket right before it connects, so that what was checked is what is
  connected to, whatever the name says a moment later, on the first request and after every redirect.

`--allow_private_urls` lifts the rule about addresses and ports; scheme and user info are checked all the same.
Sources of the table: IANA's IPv4 and IPv6 special-purpose address registries (RFC 6890), RFC 6052 (NAT64), RFC 3056
(6to4), and the metadata addresses of the large clouds, which all lie in these ranges but one.
"""

from __future__ import annotations

import asyncio
import re
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

LONGEST_URL = 8_192  # characters
RESOLVE_SECONDS = 10.0

_NOT_PUBLIC_4 = tuple(
    IPv4Network(net)
    for net in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's platform address, in public space
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",  # IETF protocols; Oracle's metadata
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_PUBLIC_6 = IPv6Network("2000::/3")  # the only global unicast space given out so far
_NOT_PUBLIC_6 = tuple(
    IPv6Network(net)
    for net in (
        "2001::/23",  # IETF protocols, Teredo
        "2001:db8::/32",
        "3fff::/20",
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")
_LOCAL_NAMES = ("localhost", "localdomain", "localhost6", "ip6-localhost", "ip6-loopback", "local", "internal")
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?\.?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


class AddressRefused(OSError):
    """A connection to an address that tools may not reach; the text says which."""


def is_public(address: str | IPv4Address | IPv6Address) -> bool:
    """True for a unicast address of the public internet. Raises `ValueError` for text that is no address."""
    ip = ip_address(address.partition("%")[0]) if isinstance(address, str) else address
    if isinstance(ip, IPv4Address):
        return not any(ip in net for net in _NOT_PUBLIC_4)
    inside = ip.ipv4_mapped or ip.sixtofour
    if inside is None and ip in _NAT64:
        inside = IPv4Address(int(ip) & 0xFFFFFFFF)
    if inside is not None:
        return is_public(inside)
    return ip in _PUBLIC_6 and not any(ip in net for net in _NOT_PUBLIC_6)


def check_url(url: str, *, allow_private: bool = False) -> str:
    """Why this URL is refused, as a sentence; empty where nothing in its text speaks against it.

    Names are not resolved here: follow with `resolve_and_check`, or connect with `guarded_session`.
    """
    if len(url) > LONGEST_URL:
        return f"The URL is longer than {LONGEST_URL} characters."
    if _CONTROL.search(url):
        return "The URL holds a control character or a backslash."
    try:
        parts = URL(url)
        port = parts.port
        host = (parts.raw_host or "").lower()
    except ValueError as error:
        return f"This is not a URL: {error}."
    if parts.scheme not in ("http", "https"):
        return f"Only http and https URLs can be read, not {parts.scheme or 'relative'} ones."
    if parts.raw_user is not None or parts.raw_password is not None:
        return "URLs with a user name or password are refused."
    try:
        address = literal_address(host)
    except ValueError:
        return f"{host or 'An empty name'} is not a valid host."
    if not allow_private and address is not None and not is_public(address):
        return _refusal(host, str(address))
    if not allow_private and host.rstrip(".").rpartition(".")[2] in _LOCAL_NAMES:
        return f"{host} is a name of a local network; only public addresses can be reached."
    if port is None or port == 0 or (port < 1024 and port not in (80, 443) and not allow_private):
        return f"Port {port} is refused; use 80, 443 or one from 1024 on."
    return ""


def literal_address(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host spells in any form, None for a name.

    IPv4 follows the WHATWG URL standard's number parser, which is what `inet_aton` and browsers do: one to four parts,
    each decimal, octal (leading 0) or hexadecimal (0x), the last filling the bytes that are left.
    Raises `ValueError` for what is neither an address nor a name.
    """
    if ":" in host:
        return IPv6Address(host)  # a zone (%) only exists for link-local ones, and is no address here
    if not _HOST.fullmatch(host) or ".." in host:
        raise ValueError(host)
    labels = host.rstrip(".").split(".")
    if not _NUMBER.fullmatch(labels[-1]):
        return None
    if len(labels) > 4 or not all(_NUMBER.fullmatch(label) for label in labels):
        raise ValueError(host)
    *head, last = (_number(label) for label in labels)
    if any(part > 255 for part in head) or last >= 256 ** (4 - len(head)):
        raise ValueError(host)
    return IPv4Address(last + sum(part << 8 * (3 - i) for i, part in enumerate(head)))


async def resolve_and_check(host: str, *, allow_private: bool = False) -> str:
    """Why a host is refused once it is resolved; empty where every address it has is public.

    For clients that connect on their own (a browser): one private address among several refuses the name, since
    nobody can say which one they will take.
    """
    if allow_private:
        return ""
    try:
        found = await asyncio.wait_for(
            asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM), RESOLVE_SECONDS
        )
    except (OSError, UnicodeError, TimeoutError) as error:
        return f"{host} cannot be resolved: {error or 'no answer in time'}."
    for *_, address in found:
        if not is_public(str(address[0])):
            return _refusal(host, str(address[0]))
    return ""


class GuardedResolver(AbstractResolver):
    """A resolver that gives the public addresses of a name only; raises `AddressRefused` where it has none.

    Args:
        inner: who really resolves; the system by default.
    """

    def __init__(self, inner: AbstractResolver | None = None) -> None:
        self._inner = inner or aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of `host` that may be connected to."""
        found = await self._inner.resolve(host, port, family)
        public = [entry for entry in found if is_public(entry["host"])]
        if found and not public:
            raise AddressRefused(_refusal(host, found[0]["host"]))
        return public

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._inner.close()


def guarded_session(allow_private: bool, *, resolver: AbstractResolver | None = None) -> aiohttp.ClientSession:
    """An HTTP client that connects to public addresses only; to be closed by the caller.

    It keeps no cookies and knows no proxy. A refused connection raises `aiohttp.ClientConnectorError` whose `os_error`
    is an `AddressRefused`.
    """
    if allow_private:
        connector = aiohttp.TCPConnector(resolver=resolver)
    else:
        connector = aiohttp.TCPConnector(resolver=GuardedResolver(resolver), socket_factory=_checked_socket)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _checked_socket(info: Any) -> socket.socket:
    """The last judgement: `info` is the very address that this socket will connect to."""
    family, kind, protocol, _, address = info
    if not is_public(str(address[0])):
        raise AddressRefused(_refusal(str(address[0]), str(address[0])))
    return socket.socket(family, kind, protocol)


def _number(text: str) -> int:
    if text.startswith("0x"):
        return int(text[2:] or "0", 16)
    if text.startswith("0") and len(text) > 1:
        return int(text, 8)  # raises ValueError for 08
    return int(text)


def _refusal(host: str, address: str) -> str:
    shown = host if host == address else f"{host} ({address})"
    return f"{shown} is not a public address; only public addresses can be reached."
