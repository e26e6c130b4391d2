"""Modal and Daytona against the conformance suite. Not exercised live: at the SDKs' seams are stand-ins here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


# Modal alone.


@pytest.fixture
def modal_provider(modal_sdk: ModalSdk) -> Iterator[ModalSandboxes]:
    provider = ModalSandboxes()
    yield provider
    provider.close()


def the_modal_box(sdk: ModalSdk) -> Any:
    (box,) = sdk.boxes
    return box


async def test_modal_is_asked_for_what_the_spec_says(modal_sdk: ModalSdk, modal_provider: ModalSandboxes) -> None:
    limits = Limits(memory_mb=512, cpus=1.5)
    async with started(modal_provider, image="full:1", limits=limits, env={"GIVEN": "a 'b'"}) as box:
        given = the_modal_box(modal_sdk).given
        assert (given["cpu"], given["memory"], given["block_network"]) == ((1.5, 1.5), (512, 512), True)
        assert given["tags"]["gristmill-run"] == "suite" and given["tags"]["gristmill-owner"] == owner.owner()
        assert "env" not in given and "secrets" not in given
        assert await text(box, "echo $GIVEN") == "a 'b'"
    async with started(modal_provider, image="docker://full:1", network=True):
        given = the_modal_box(modal_sdk).given
        assert "cpu" not in given and "memory" not in given and not given["block_network"]
    assert modal_sdk.builds == ["full:1", "full:1"]


async def test_modal_builds_an_image_once(modal_sdk: ModalSdk, modal_provider: ModalSandboxes) -> None:
    async def fail(image: str, words: str) -> None:
        box = modal_provider.make(spec(image=image))
        with pytest.raises(SandboxError, match=words):
            await box.start()
        await box.stop()

    async def work() -> None:
        async with started(modal_provider, image="full:1") as box:
            assert await text(box, "echo well") == "well"

    await asyncio.gather(work(), work(), *(fail("missing:1", "manifest unknown") for _ in range(3)))
    await fail("missing:1", "manifest unknown")
    await fail("", "TERMINAL_MODAL_IMAGE")
    await fail("full:1\nRUN x", "cannot be the name")
    await fail("no-bash:1", "could not be started")
    assert sorted(modal_sdk.builds) == ["full:1", "missing:1", "no-bash:1"]


async def test_modal_gets_a_pulse_as_long_as_there_are_sandboxes(
    modal_sdk: ModalSdk, modal_provider: ModalSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modal_adapter, "PULSE_SECONDS", 0.05)
    monkeypatch.setattr(modal_adapter, "PULSES", modal_adapter.PULSES.replace("900", "1"))
    async with started(modal_provider, image="full:1") as box:
        modal_box = the_modal_box(modal_sdk)
        await asyncio.sleep(1.3)
        assert modal_box.pulses > 3 and not modal_box.ended
        monkeypatch.setattr(modal_adapter, "PULSE_SECONDS", 100)
        assert await soon(lambda: modal_box.ended, 3)
        with pytest.raises(SandboxError):
            await box.exec("true", timeout=5)


async def test_modal_refuses_and_we_say_why(modal_sdk: ModalSdk, modal_provider: ModalSandboxes) -> None:
    assert ModalSandboxes.problem() == ""
    modal_sdk.error = modal_sdk.exception.AuthError("Token missing. Run `modal token new`.")
    assert "modal token new" in ModalSandboxes.problem()
    modal_sdk.error = modal_sdk.exception.ConnectionError("no route")
    assert "cannot be reached: no route" in ModalSandboxes.problem()
    for error in (modal_sdk.exception.PermissionDeniedError("no such workspace"), OSError("no route")):
        modal_sdk.error = error
        box = modal_provider.make(spec(image="full:1"))
        with pytest.raises(SandboxError, match=str(error)):
            await box.start()
        await box.stop()
    async with started(modal_provider, image="full:1") as box:
        assert await text(box, "echo well") == "well"


async def test_a_sandbox_that_modal_makes_late_is_ended(modal_sdk: ModalSdk, modal_provider: ModalSandboxes) -> None:
    modal_sdk.delay = 0.3
    box = modal_provider.make(spec(image="full:1"))
    starting = asyncio.ensure_future(box.start())
    assert await soon(lambda: "full:1" in modal_sdk.builds)
    await asyncio.sleep(0.1)
    starting.cancel()
    await asyncio.wait((starting,))
    await box.stop()
    assert not modal_sdk.boxes


@pytest.fixture
def dead_label() -> str:
    """The label of a process of ours that is no more."""
    place, boot, namespace, _, start = owner.owner().split(".")
    return f"{place}.{boot}.{namespace}.4194305.{start}"


async def test_the_next_worker_ends_what_a_dead_one_left_at_modal(
    modal_sdk: ModalSdk, modal_provider: ModalSandboxes, dead_label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes, sandboxes = {}, []
    for run, label in (("suite", dead_label), ("other", dead_label), ("suite", owner.owner()), ("suite", "x.y.0.1.2")):
        monkeypatch.setattr(modal_adapter, "owner", lambda label=label: label)
        box = modal_provider.make(SandboxSpec(session_id="s", run_id=run, image="full:1"))
        sandboxes.append(box)
        before = set(modal_sdk.boxes)
        await box.start()
        (boxes[run, label],) = modal_sdk.boxes - before
    monkeypatch.undo()
    monkeypatch.setattr(modal_adapter, "modal", modal_sdk)
    next_one = ModalSandboxes()
    async with started(next_one, image="full:1"):
        assert await soon(lambda: boxes["suite", dead_label].ended)
        assert [label for label, box in boxes.items() if box.ended] == [("suite", dead_label)]
    assert await asyncio.to_thread(modal_adapter.reap) == 1
    assert [box.ended for box in boxes.values()] == [True, True, False, False]
    for box in sandboxes:
        await box.stop()


# Daytona alone.


@pytest.fixture
def daytona_provider(daytona_sdk: DaytonaSdk) -> Iterator[DaytonaSandboxes]:
    provider = DaytonaSandboxes()
    yield provider
    provider.close()


def the_daytona_box(sdk: DaytonaSdk) -> Any:
    (box,) = sdk.boxes
    return box


async def test_daytona_is_asked_for_what_the_spec_says(
    daytona_sdk: DaytonaSdk, daytona_provider: DaytonaSandboxes
) -> None:
    limits = Limits(memory_mb=1500, cpus=1.5, disk_mb=5000)
    async with started(daytona_provider, image="full:1", limits=limits, env={"GIVEN": "a 'b'"}) as box:
        given = the_daytona_box(daytona_sdk).given
        assert (given.resources.cpu, given.resources.memory, given.resources.disk) == (2, 2, 5)
        assert given.network_block_all and given.labels["gristmill-owner"] == owner.owner() and not given.env_vars
        assert await text(box, "echo $GIVEN; env | grep -c DAYTONA") == "a 'b'\n0"
    async with started(daytona_provider, image="docker://full:1", network=True):
        given = the_daytona_box(daytona_sdk).given
        assert given.image == "full:1" and given.resources.cpu is None and not given.network_block_all


async def test_an_image_that_daytona_cannot_have(daytona_sdk: DaytonaSdk, daytona_provider: DaytonaSandboxes) -> None:
    for image, words in (
        ("missing:1", "manifest unknown"),
        ("", "TERMINAL_DAYTONA_IMAGE"),
        ("full:1\nRUN x", "cannot be the name"),
    ):
        box = daytona_provider.make(spec(image=image))
        with pytest.raises(SandboxError, match=words):
            await box.start()
        await box.stop()


async def test_commands_at_daytona_cost_two_calls(daytona_sdk: DaytonaSdk, daytona_provider: DaytonaSandboxes) -> None:
    async with started(daytona_provider, image="full:1") as box:
        daytona_box = the_daytona_box(daytona_sdk)
        before = daytona_box.commands
        for _ in range(10):
            assert await text(box, "echo well") == "well"
        assert daytona_box.commands - before <= 30


async def test_daytona_refuses_and_we_say_why(daytona_sdk: DaytonaSdk, daytona_provider: DaytonaSandboxes) -> None:
    assert DaytonaSandboxes.problem() == ""
    daytona_sdk.error = daytona_sdk.DaytonaAuthenticationError("Set DAYTONA_API_KEY.")
    assert "Set DAYTONA_API_KEY." in DaytonaSandboxes.problem()
    daytona_sdk.error = OSError("no route")
    assert "cannot be reached: no route" in DaytonaSandboxes.problem()
    async with started(daytona_provider, image="full:1") as box:
        assert await text(box, "echo well") == "well"
        daytona_sdk.error = daytona_sdk.DaytonaConnectionError("no route any more")
        began = time.monotonic()
        await box.exec("echo", timeout=3)  # the order is lost; another program takes the place of the first
        assert time.monotonic() - began < 10
        assert await text(box, "echo well") == "well"


async def test_a_sandbox_that_is_gone_is_an_error(daytona_sdk: DaytonaSdk, daytona_provider: DaytonaSandboxes) -> None:
    async with started(daytona_provider, image="full:1") as box:
        the_daytona_box(daytona_sdk).end()
        with pytest.raises(SandboxError):
            await box.exec("true", timeout=5)
            await box.exec("true", timeout=5)


async def test_the_next_worker_ends_what_a_dead_one_left_at_daytona(
    daytona_sdk: DaytonaSdk, daytona_provider: DaytonaSandboxes, dead_label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes, sandboxes = {}, []
    for run, label in (("suite", dead_label), ("other", dead_label), ("suite", owner.owner())):
        monkeypatch.setattr(daytona_adapter, "owner", lambda label=label: label)
        box = daytona_provider.make(SandboxSpec(session_id="s", run_id=run, image="full:1"))
        sandboxes.append(box)
        before = set(daytona_sdk.boxes)
        await box.start()
        (boxes[run, label],) = daytona_sdk.boxes - before
    monkeypatch.undo()
    monkeypatch.setattr(daytona_adapter, "daytona", daytona_sdk)
    next_one = DaytonaSandboxes()
    async with started(next_one, image="full:1"):
        assert await soon(lambda: boxes["suite", dead_label] not in daytona_sdk.boxes)
        assert boxes["other", dead_label] in daytona_sdk.boxes and boxes["suite", owner.owner()] in daytona_sdk.boxes
    assert await asyncio.to_thread(daytona_adapter.reap) == 1
    assert daytona_sdk.boxes == {boxes["suite", owner.owner()]}
    for box in sandboxes:
        await box.stop()


@pytest.mark.parametrize("kind", ["modal", "daytona"])
async def test_closing_the_provider_ends_what_runs(kind: str, modal_sdk: ModalSdk, daytona_sdk: DaytonaSdk) -> None:
    provider = ModalSandboxes() if kind == "modal" else DaytonaSandboxes()
    sleep = unique_sleep()
    box = provider.make(spec(image="full:1"))
    await box.start()
    await box.exec(f"setsid {sleep} &", timeout=20)
    began = time.monotonic()
    provider.close()
    assert time.monotonic() - began < STOP_SECONDS and not running(sleep)
    with pytest.raises(SandboxError):
        await box.exec("true", timeout=5)
    await box.stop()
