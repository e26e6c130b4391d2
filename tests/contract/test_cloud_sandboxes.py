"""Modal and Daytona against the conformance suite. Not exercised live: at the SDKs' seams are stand-ins here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from gristmill.errors import SandboxError
from gristmill.sandbox import owner
from gristmill.sandbox.base import STOP_SECONDS, Sandbox, SandboxSpec
from gristmill.testing.boxes import running, soon, spec, started, text, unique_sleep
from gristmill.testing.sandbox_suite import SandboxSuite
from gristmill.types import Limits

pytest.importorskip("modal")
pytest.importorskip("daytona")

import gristmill.sandbox.daytona as daytona_adapter
import gristmill.sandbox.modal as modal_adapter
from gristmill.sandbox.daytona import DaytonaSandboxes
from gristmill.sandbox.modal import ModalSandboxes
from support.daytona_sdk import Sdk as DaytonaSdk
from support.modal_sdk import Sdk as ModalSdk


class ImagedModal(ModalSandboxes):
    """Takes an image where the spec names none."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        return super().make(msgspec.structs.replace(spec, image=spec.image or "full:1"))


@pytest.fixture
def modal_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalSdk]:
    sdk = ModalSdk(tmp_path / "modal")
    monkeypatch.setattr(modal_adapter, "modal", sdk)
    yield sdk
    left, _ = set(sdk.boxes), sdk.end()
    assert not left


class TestModal(SandboxSuite):
    @pytest.fixture
    def provider(self, modal_sdk: ModalSdk) -> Iterator[ImagedModal]:
        provider = ImagedModal()
        yield provider
        assert not modal_sdk.boxes
        provider.close()


class ImagedDaytona(DaytonaSandboxes):
    """Takes an image where the spec names none."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        return super().make(msgspec.structs.replace(spec, image=spec.image or "full:1"))


@pytest.fixture
def daytona_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaytonaSdk]:
    sdk = DaytonaSdk(tmp_path / "daytona")
    monkeypatch.setattr(daytona_adapter, "daytona", sdk)
    yield sdk
    left, _ = set(sdk.boxes), sdk.end()
    assert not left and not sdk.clients


class TestDaytona(SandboxSuite):
    @pytest.fixture
    def provider(self, daytona_sdk: DaytonaSdk) -> Iterator[ImagedDaytona]:
        provider = ImagedDaytona()
        yield provider
        assert not daytona_sdk.boxes
        provider.close()
