"""Containers of Docker Engine and of Podman against the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("aiodocker")

from gristmill.testing.sandbox_suite import SandboxSuite
from support.containers import Imaged

if TYPE_CHECKING:
    from support.engines import Engine

pytest_plugins = ["support.engines"]


def provider_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imaged]:
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    provider = Imaged()
    yield provider
    assert engine.containers("gristmill.run=suite") == []
    provider.close()


class TestDocker(SandboxSuite):
    @pytest.fixture
    def provider(self, docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imaged]:
        yield from provider_of(docker_engine, monkeypatch)


@pytest.mark.soak
class TestPodman(SandboxSuite):
    @pytest.fixture
    def provider(self, podman_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imaged]:
        yield from provider_of(podman_engine, monkeypatch)


class TestPodmanInShort:
    """What Podman might do otherwise than Docker."""

    @pytest.fixture
    def provider(self, podman_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imaged]:
        yield from provider_of(podman_engine, monkeypatch)

    box = SandboxSuite.box
    test_streams = SandboxSuite.test_output_is_one_stream_in_order
    test_stdin = SandboxSuite.test_stdin_is_what_was_given_and_then_ends
    test_jobs = SandboxSuite.test_a_job_reads_writes_and_ends
    test_lanes = SandboxSuite.test_stateless_commands_run_beside_a_stateful_one
    test_timeouts = SandboxSuite.test_a_timeout_kills_the_whole_tree_and_nothing_else
    test_writers = SandboxSuite.test_a_background_writer_lives_on_when_nobody_reads
    test_variables = SandboxSuite.test_only_the_specs_variables_enter
    test_stopping = SandboxSuite.test_stop_at_any_time
    test_cleaning = SandboxSuite.test_cleanup_without_the_event_loop
    test_cancelling = SandboxSuite.test_cancelling_any_await_leaves_it_stoppable
