"""Containers of Docker Engine and of Podman against the conformance suite, and what is special about them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from gristmill.sandbox.base import Sandbox, SandboxSpec
from gristmill.sandbox.docker import DockerSandboxes
from gristmill.testing.sandbox_suite import SandboxSuite
from support.engines import Engine
from support.images import FULL

pytest_plugins = ["support.engines"]


class Imaged(DockerSandboxes):
    """Takes an image where the spec names none."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        return super().make(msgspec.structs.replace(spec, image=spec.image or FULL))


class TestDocker(SandboxSuite):
    @pytest.fixture
    def provider(self, docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imaged]:
        monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
        provider = Imaged()
        yield provider
        assert docker_engine.containers("gristmill.run=suite") == []
        provider.close()


class TestPodman(SandboxSuite):
    @pytest.fixture
    def provider(self, podman_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imaged]:
        monkeypatch.setenv("DOCKER_HOST", podman_engine.url)
        provider = Imaged()
        yield provider
        assert podman_engine.containers("gristmill.run=suite") == []
        provider.close()
