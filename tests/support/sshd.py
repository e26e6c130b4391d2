"""A real SSH server on loopback for tests, with keys of its own. Use with `pytest_plugins = ["support.sshd"]`."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") or ""


class Server:
    """One sshd that lets the present user in by one key. `home` has a `.ssh/known_hosts` that knows it."""

    def __init__(self, root: Path, *, more: str = "") -> None:
        self.root = root
        self.home = root / "home"
        self.temp = root / "tmp"  # TMPDIR of those who log in
        self.key = root / "key"
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        self.temp.mkdir()
        for name in ("host", "key", "other"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)]
            subprocess.run(argv, check=True, capture_output=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.known_hosts = self.home / ".ssh" / "known_hosts"
        self.learn("host")
        (root / "config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {root}/host\nPidFile none\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {root}/key.pub\nPermitRootLogin prohibit-password\nMaxStartups 100\n"
            f"SetEnv TMPDIR={self.temp}\nAcceptEnv *\nPermitUserEnvironment no\n{more}"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, str]:
        """What leads a provider here."""
        return {
            "TERMINAL_SSH_HOST": "127.0.0.1",
            "TERMINAL_SSH_PORT": str(self.port),
            "TERMINAL_SSH_USER": getpass.getuser(),
            "TERMINAL_SSH_KEY": str(self.key),
        }

    def learn(self, name: str) -> None:
        """Write a key down as the host's."""
        kind, key = (self.root / f"{name}.pub").read_text().split()[:2]
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def start(self) -> None:
        run = f"exec {PROGRAM} -D -e -f {self.root}/config"
        if os.geteuid() == 0:
            # It needs /run/sshd, which is made where nobody else sees it; and root's own start-up files do not count.
            run = f"mount -t tmpfs tmpfs /run && mkdir /run/sshd && mount -t tmpfs tmpfs /root && {run}"
        argv = ["unshare", "--mount", "sh", "-c", run] if os.geteuid() == 0 else ["sh", "-c", run]
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise RuntimeError(f"sshd did not start: {(self.root / 'log').read_text()[-2000:]}")

    def sessions(self) -> list[int]:
        """The processes that serve one connection each."""
        assert self._process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError):
                    continue
                if parent == self._process.pid:
                    found.append(int(entry.name))
        return found

    def left(self) -> list[str]:
        """What lies in the users' temporary directory."""
        return sorted(path.name for path in self.temp.iterdir())

    def stop(self) -> None:
        if self._process is not None:
            for pid in (*self.sessions(), self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that knows how to be reached; HOME is left as it is."""
    if not PROGRAM:
        pytest.skip("sshd is not installed (Debian: openssh-server)")
    server = Server(tmp_path_factory.mktemp("sshd"))
    server.start()
    yield server
    server.stop()
