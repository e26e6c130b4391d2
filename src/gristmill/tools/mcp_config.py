"""The file of `--mcp_config`: which MCP servers a run may use, in the form that other clients use too.

```
{"mcpServers": {
   "docs":   {"command": "npx", "args": ["-y", "some-server"], "env": {"TOKEN": "${DOCS_TOKEN}"}},
   "search": {"url": "https://mcp.example.com/mcp", "headers": {"Authorization": "Bearer ${SEARCH_KEY}"},
              "tools": ["find"], "timeout": 120}},
 "allowedVariables": ["DOCS_TOKEN", "SEARCH_KEY"]}
```

A server's name is its toolset's. `${NAME}` and `${NAME:-default}` are filled in within `args`, `env`, `url` and
`headers`, but only for the names in `allowedVariables`: a file from elsewhere cannot have other secrets read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import orjson

from gristmill.errors import UsageError

NAME_LENGTH = 40  # characters of a server's name, which may become part of a tool's
SECRET_LENGTH = 6  # characters from which a value can be a secret

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SECRET = re.compile(r"key|token|secret|passw|auth|credential|cookie", re.IGNORECASE)
_TYPES = {
    "stdio": "command",
    "http": "url",
    "streamable-http": "url",
    "streamableHttp": "url",
    "streamable_http": "url",
}
_IGNORED = ("description", "autoApprove", "alwaysAllow", "$schema")  # words of other clients, without meaning here


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server: a program to talk to over its stdin and stdout, or the URL of a streamable HTTP endpoint."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}  # beside PATH, HOME, USER, LOGNAME, SHELL and TERM, which it gets in any case
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    tools: tuple[str, ...] = ()  # the ones to offer, by the server's names; empty: all
    per_session: bool = False  # a client, and so a program, of its own for each session; else one per worker
    timeout: float = 60.0  # seconds of one call
    start_timeout: float = 30.0  # seconds until it must have listed its tools

    filled: tuple[str, ...] = ()  # values that came from the environment; not a field of the file

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never stand in a result, longest first: what the environment gave, and what is named like a key."""
        options = [(flag, value) for flag, value in pairwise(self.args) if flag[:1] == "-" and "=" not in flag]
        options += [(flag, value) for flag, _, value in (arg.partition("=") for arg in self.args)]
        given = (*self.env.items(), *self.headers.items(), *options, *parse_qsl(urlsplit(self.url).query))
        named = [value for name, value in given if _SECRET.search(name)]
        named += [value.partition(" ")[2] for value in named]  # the key of "Bearer KEY"
        values = {value for value in (*named, *self.filled) if len(value) >= SECRET_LENGTH}
        return tuple(sorted(values, key=len, reverse=True))


class McpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of a run, in the file's order."""

    servers: tuple[McpServer, ...] = ()


def load_mcp_config(path: str, environ: Mapping[str, str]) -> McpConfig:
    """Read and check the file. Relative `cwd`s are taken from its folder.

    Args:
        path: of the JSON file.
        environ: where allowed variables are looked up.

    Raises:
        UsageError: names the place in the file, such as `mcpServers.docs.args[1]`.
    """
    try:
        data = orjson.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"--mcp_config {path} cannot be read: {error.strerror}.") from error
    except orjson.JSONDecodeError as error:
        raise UsageError(f"--mcp_config {path} is not JSON: {error}.") from error
    return _Reader(path, environ).read(data)


class _Reader:
    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path = path
        self._environ = environ
        self._allowed: frozenset[str] = frozenset()
        self._found: list[str] = []  # what the environment gave for the present server

    def read(self, data: Any) -> McpConfig:
        if not isinstance(data, dict) or not isinstance(data.get("mcpServers"), dict):
            raise self._wrong("mcpServers", 'must be an object: {"mcpServers": {"name": {"command": …}}}')
        self._unknown("", data, ("mcpServers", "allowedVariables", *_IGNORED))
        self._allowed = frozenset(self._texts("allowedVariables", data.get("allowedVariables", [])))
        servers = []
        for name, entry in data["mcpServers"].items():
            place = f"mcpServers.{name}"
            if not _NAME.fullmatch(name) or len(name) > NAME_LENGTH:
                raise self._wrong(
                    place, f"is no name for a toolset: a letter, then letters, digits, - and _, at most {NAME_LENGTH}"
                )
            if not isinstance(entry, dict):
                raise self._wrong(place, "must be an object")
            if entry.get("disabled") is True:
                continue
            servers.append(self._server(place, name, entry))
        return McpConfig(servers=tuple(servers))

    def _server(self, place: str, name: str, entry: dict[str, Any]) -> McpServer:
        fields = [field for field in McpServer.__struct_fields__ if field not in ("name", "filled")]
        self._unknown(place, entry, (*fields, "type", "disabled", *_IGNORED))
        given = {field: entry[field] for field in fields if field in entry}
        ways = [way for way in ("command", "url") if given.get(way)]
        if len(ways) != 1:
            raise self._wrong(place, "must have either a command or a url")
        kind = entry.get("type", "stdio" if ways == ["command"] else "http")
        if kind == "sse":
            raise self._wrong(f"{place}.type", "sse is the old transport; give the server's streamable HTTP url")
        if _TYPES.get(kind) != ways[0]:
            raise self._wrong(f"{place}.type", f"{kind!r} does not go with a {ways[0]}")
        checks: dict[str, Callable[[str, Any], Any]] = {
            "command": self._text,
            "args": lambda place, value: tuple(self._filled_texts(place, value)),
            "env": self._filled_map,
            "cwd": lambda place, value: str((Path(self._path).parent / self._text(place, value)).resolve()),
            "url": self._url,
            "headers": self._filled_map,
            "tools": lambda place, value: tuple(self._texts(place, value)),
            "per_session": self._flag,
            "timeout": self._seconds,
            "start_timeout": self._seconds,
        }
        self._found = []
        values = {field: checks[field](f"{place}.{field}", value) for field, value in given.items()}
        if "tools" in values and not values["tools"]:
            raise self._wrong(f"{place}.tools", "is empty; leave it out to offer all")
        return McpServer(name=name, filled=tuple(self._found), **values)

    def _url(self, place: str, value: Any) -> str:
        url = self._filled(place, self._text(place, value))
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise self._wrong(place, f"{value!r} is no http or https URL")
        return url

    def _filled_texts(self, place: str, value: Any) -> list[str]:
        return [self._filled(f"{place}[{number}]", text) for number, text in enumerate(self._texts(place, value))]

    def _filled_map(self, place: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise self._wrong(place, "must be an object of texts")
        return {key: self._filled(f"{place}.{key}", self._text(f"{place}.{key}", text)) for key, text in value.items()}

    def _filled(self, place: str, text: str) -> str:
        def fill(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            if name not in self._allowed:
                raise self._wrong(place, f"${{{name}}} is not among allowedVariables")
            value = self._environ.get(name)
            if value:
                self._found.append(value)
                return value
            if default is None:
                raise self._wrong(place, f"{name} is not set in the environment")
            return default

        return _VARIABLE.sub(fill, text)

    def _texts(self, place: str, value: Any) -> list[str]:
        if not isinstance(value, list):
            raise self._wrong(place, "must be a list of texts")
        return [self._text(f"{place}[{number}]", text) for number, text in enumerate(value)]

    def _text(self, place: str, value: Any) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise self._wrong(place, "must be text")
        return value

    def _flag(self, place: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self._wrong(place, "must be true or false")
        return value

    def _seconds(self, place: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
            raise self._wrong(place, "must be a number of seconds above 0")
        return float(value)

    def _unknown(self, place: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in value:
            if key not in known:
                inside = f"{place}.{key}" if place else key
                raise self._wrong(inside, f"is unknown; known are {', '.join(k for k in known if k not in _IGNORED)}")

    def _wrong(self, place: str, what: str) -> UsageError:
        return UsageError(f"--mcp_config {self._path}: {place} {what}.")
