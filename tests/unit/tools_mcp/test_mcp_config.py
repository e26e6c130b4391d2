"""The file of `--mcp_config`: what is taken, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.errors import UsageError
from gristmill.tools.mcp_config import McpConfig, load_mcp_config


def load(path: Path, data: Any, **environ: str) -> McpConfig:
    file = path / "servers.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return load_mcp_config(str(file), environ)


def test_the_usual_form_is_read(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        {
            "mcpServers": {
                "files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "1"}, "cwd": "here", "type": "stdio"},
                "docs": {"url": "https://example.com/mcp", "headers": {"X": "1"}, "tools": ["find"], "timeout": 5},
                "off": {"command": "x", "disabled": True},
                "own": {"command": "x", "per_session": True, "autoApprove": ["a"], "description": "words"},
            }
        },
    )
    files, docs, own = config.servers
    assert (files.name, files.command, files.args, files.env) == ("files", "npx", ("-y", "x"), {"A": "1"})
    assert files.cwd == str(tmp_path / "here")
    assert (docs.url, docs.headers, docs.tools, docs.timeout) == ("https://example.com/mcp", {"X": "1"}, ("find",), 5.0)
    assert own.per_session and not files.per_session
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=McpConfig) == config


def test_only_allowed_variables_are_filled_in(tmp_path: Path) -> None:
    entry = {"command": "x", "env": {"A": "v-${ONE}-${TWO:-two}"}, "args": ["--k=${ONE}"]}
    config = load(tmp_path, {"mcpServers": {"s": entry}, "allowedVariables": ["ONE", "TWO"]}, ONE="first-key", TWO="")
    assert config.servers[0].env == {"A": "v-first-key-two"} and config.servers[0].args == ("--k=first-key",)
    assert config.servers[0].secrets == ("first-key",)
    with pytest.raises(UsageError, match=r"mcpServers\.s\.args\[0\] \$\{ONE\} is not among allowedVariables"):
        load(tmp_path, {"mcpServers": {"s": entry}}, ONE="1", TWO="2")
    with pytest.raises(UsageError, match=r"mcpServers\.s\.args\[0\] ONE is not set"):
        load(tmp_path, {"mcpServers": {"s": entry}, "allowedVariables": ["ONE", "TWO"]})
    plain = {"command": "x", "env": {"HOME": "$HOME ${"}}
    assert load(tmp_path, {"mcpServers": {"s": plain}}).servers[0].env == {"HOME": "$HOME ${"}


def test_what_is_named_like_a_key_is_a_secret(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer abcdef123", "X-Mode": "production"}
    config = load(tmp_path, {"mcpServers": {"s": {"url": "http://h/", "headers": headers}}})
    assert config.servers[0].secrets == ("Bearer abcdef123", "abcdef123")
    config = load(tmp_path, {"mcpServers": {"s": {"url": "http://h/mcp?apiKey=in-a-query&mode=production"}}})
    assert config.servers[0].secrets == ("in-a-query",)
    args = ["--api-key", "in-an-argument", "--token=in-another", "--mode", "production", "token-file"]
    config = load(tmp_path, {"mcpServers": {"s": {"command": "x", "args": args}}})
    assert config.servers[0].secrets == ("in-an-argument", "in-another")


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ("{", "is not JSON"),
        ([], "mcpServers must be an object"),
        ({"servers": {}}, "mcpServers must be an object"),
        ({"mcpServers": {}, "inputs": []}, "inputs is unknown"),
        ({"mcpServers": {"a b": {"command": "x"}}}, "mcpServers.a b is no name"),
        ({"mcpServers": {"a" * 41: {"command": "x"}}}, "is no name"),
        ({"mcpServers": {"a": []}}, "mcpServers.a must be an object"),
        ({"mcpServers": {"a": {}}}, "mcpServers.a must have either a command or a url"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://h/"}}}, "either a command or a url"),
        ({"mcpServers": {"a": {"command": ["x"]}}}, "mcpServers.a.command must be text"),
        ({"mcpServers": {"a": {"command": "x", "args": "y"}}}, "mcpServers.a.args must be a list"),
        ({"mcpServers": {"a": {"command": "x", "args": ["y", 1]}}}, "mcpServers.a.args[1] must be text"),
        ({"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}, "mcpServers.a.env.A must be text"),
        ({"mcpServers": {"a": {"command": "x", "env": ["A"]}}}, "mcpServers.a.env must be an object"),
        ({"mcpServers": {"a": {"command": "x", "tool": ["y"]}}}, "mcpServers.a.tool is unknown; known are command"),
        ({"mcpServers": {"a": {"command": "x", "tools": []}}}, "mcpServers.a.tools is empty"),
        ({"mcpServers": {"a": {"command": "x", "timeout": 0}}}, "mcpServers.a.timeout must be a number"),
        ({"mcpServers": {"a": {"command": "x", "timeout": True}}}, "mcpServers.a.timeout must be a number"),
        ({"mcpServers": {"a": {"command": "x", "per_session": 1}}}, "mcpServers.a.per_session must be true or false"),
        (
            {"mcpServers": {"a": {"command": "x", "type": "http"}}},
            "mcpServers.a.type 'http' does not go with a command",
        ),
        ({"mcpServers": {"a": {"url": "http://h/", "type": "sse"}}}, "mcpServers.a.type sse is the old transport"),
        ({"mcpServers": {"a": {"url": "ftp://h/"}}}, "mcpServers.a.url 'ftp://h/' is no http"),
        ({"mcpServers": {"a": {"url": "http://h:x/"}}}, "mcpServers.a.url"),
        ({"mcpServers": {"a": {"command": "x", "filled": []}}}, "mcpServers.a.filled is unknown"),
        ({"mcpServers": {}, "allowedVariables": "A"}, "allowedVariables must be a list"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, data: Any, place: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, data)
    assert place in str(caught.value) and str(tmp_path / "servers.json") in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_mcp_config(str(tmp_path / "none.json"), {})
