"""Sandboxes on a remote host against the conformance suite, with a real SSH server on loopback, and what is special."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.sshd import Server

from gristmill.sandbox.ssh import SshSandboxes
from gristmill.testing.boxes import soon
from gristmill.testing.sandbox_suite import SandboxSuite

pytest_plugins = ["support.sshd"]


@pytest.fixture
def provider(sshd: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshSandboxes]:
    monkeypatch.setenv("HOME", str(sshd.home))
    provider = SshSandboxes(options=sshd.options)
    yield provider
    assert [path.name for path in sshd.temp.glob("*/s-*")] == []
    provider.close()


class TestSsh(SandboxSuite):
    @pytest.fixture
    def provider(self, provider: SshSandboxes) -> SshSandboxes:
        return provider
