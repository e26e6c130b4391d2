"""Fixtures of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.testing.endpoint import ScriptedEndpoint
from support.runs import FOUR_CALLS, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(FOUR_CALLS).in_thread() as running:
        yield running
