"""Fixtures of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.config import KEY_VARIABLES, TOOL_VARIABLES
from gristmill.testing.endpoint import ScriptedEndpoint
from support.runs import FOUR_CALLS, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(FOUR_CALLS).in_thread() as running:
        yield running


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without any key or provider that this machine may have."""
    for name in (*KEY_VARIABLES.values(), *TOOL_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def corpus(bare: pytest.MonkeyPatch, place: Place) -> pytest.MonkeyPatch:
    """The web is a small folder of documents."""
    bare.setenv("WEB_PROVIDER", "corpus")
    bare.setenv("GRISTMILL_CORPUS", str(Path(__file__).parents[1] / "data" / "corpus"))
    bare.setenv("XDG_CACHE_HOME", str(place.root / "cache"))
    return bare
