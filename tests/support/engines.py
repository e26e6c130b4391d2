"""Private container engines for tests: a dockerd, a Podman service and a registry, each in namespaces of its own.

An engine runs in a process, mount and network namespace that end with it, so that no process, mount or interface of it
can stay, however the tests end. Use with `pytest_plugins = ["support.engines"]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiodocker
import pytest

from support import images

# Two registries with the same images, in the engine's own network namespace.
REGISTRY = "127.0.0.1:5000"
LOCKED = "127.0.0.1:5001"  # lets in the user `user` with the password `secret`
LOCKED_USER = "user:$2b$12$rG27tk9HqNMx1btCjVOCNOGwLruo4tG9CnpX7qrIk9ZXtZE1E4Du.\n"


def missing(kind: str) -> str:
    """Why an engine cannot be started here; empty where it can."""
    if os.geteuid():
        return f"a private {kind} can be started by root only"
    needed = {
        "docker": ("dockerd", "containerd", "runc", "docker-registry", "iptables"),
        "podman": ("podman", "runc", "conmon"),
    }
    for program in (*needed[kind], "unshare", "setpriv", "ip", "busybox", "ldd"):
        if shutil.which(program) is None:
            return f"{program} is not installed (tests/support/install_engines.sh installs it)"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "namespaces cannot be made here" if done.returncode else ""


class Engine:
    """One engine. `url` is for DOCKER_HOST."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind = kind
        self.root = root
        self.url = f"unix://{root}/engine.sock"
        self._cgroup = f"gristmill-test-{os.getpid()}-{kind}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.root / "runtime").mkdir(parents=True)
        if self.kind == "docker":
            command = (
                f"{self._registry('registry', REGISTRY)} & {self._registry('locked', LOCKED)} & "
                f"exec dockerd -H {self.url} --data-root {self.root}/data --exec-root {self.root}/run "
                f"--pidfile {self.root}/pid --storage-driver overlay2 --cgroup-parent /{self._cgroup}"
            )
        else:
            self._configure_podman()
            command = f"exec podman --cgroup-manager cgroupfs system service --time=0 {self.url}"
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
        argv += ["--mount-proc", "sh", "-c", f"ip link set lo up; {command}"]
        with (self.root / "log").open("wb") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(), start_new_session=True
            )
        end = time.monotonic() + 40
        while not self._answers():
            if time.monotonic() > end or self._process.poll() is not None:
                said = (self.root / "log").read_text(errors="replace")[-2000:]
                self.stop()
                raise RuntimeError(f"the private {self.kind} did not start: {said}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it and whatever it runs, and remove its files."""
        if self._process is not None:
            # unshare's death takes the whole process namespace with it.
            self._process.kill()
            self._process.wait()
        for _ in range(100):  # until its mounts have gone with the last of its processes
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists():
                break
            time.sleep(0.05)
        # Podman has one place for all its containers; what still holds a process of somebody's cannot be removed.
        for name in (f"{self._cgroup}*", *(["libpod_parent"] if self.kind == "podman" else ())):
            for parent in [*Path("/sys/fs/cgroup").glob(name), *Path("/sys/fs/cgroup").glob(f"*/{name}")]:
                _remove_cgroup(parent)

    def call(self, work: Callable[[aiodocker.Docker], Coroutine[Any, Any, Any]]) -> Any:
        """What a coroutine that is given a client of this engine returns."""

        async def run() -> Any:
            async with aiodocker.Docker(url=self.url) as client:
                return await work(client)

        with ThreadPoolExecutor(1) as thread:  # so that a running event loop is no obstacle
            return thread.submit(asyncio.run, run()).result()

    def load(self, *archives: bytes) -> None:
        """Make images known."""

        async def work(client: aiodocker.Docker) -> None:
            for archive in archives:
                async for message in client.images.import_image(archive, stream=True):
                    assert "error" not in message, message

        self.call(work)

    def publish(self, image: str, name: str) -> str:
        """Put an image into the registry under another name, and forget that name here; the full name."""
        full = f"{REGISTRY}/{name}"

        async def work(client: aiodocker.Docker) -> None:
            await client.images.tag(image, full.rpartition(":")[0], tag=full.rpartition(":")[2])
            async for message in client.images.push(full, stream=True):
                assert "error" not in message, message
            await client.images.delete(full)

        self.call(work)
        return full

    def pulls(self, name: str) -> int:
        """How often the registry was asked for an image's manifest by its tag."""
        repository, _, tag = name.removeprefix(f"{REGISTRY}/").rpartition(":")
        log = (self.root / "registry.log").read_text(errors="replace")
        return len(re.findall(rf'"(?:GET|HEAD) /v2/{re.escape(repository)}/manifests/{re.escape(tag)} ', log))

    def containers(self, *labels: str) -> list[str]:
        """Names of all containers in any state that carry the labels."""

        async def work(client: aiodocker.Docker) -> list[str]:
            found = await client.containers.list(all=True, filters=json.dumps({"label": list(labels)}))
            return sorted(container["Names"][0].lstrip("/") for container in found)

        return list(self.call(work))

    def _answers(self) -> bool:
        try:
            return bool(self.call(lambda client: client.version()))
        except (aiodocker.DockerError, OSError):
            return False

    def _environment(self) -> dict[str, str]:
        kept = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.root), "TMPDIR": str(self.root)}
        return kept | {
            "CONTAINERS_CONF": f"{self.root}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.root}/storage.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{self.root}/registries.conf",
            "XDG_RUNTIME_DIR": f"{self.root}/runtime",
        }

    def _registry(self, name: str, address: str) -> str:
        """The command of a registry; all have the same images."""
        settings = (
            f"version: 0.1\nlog: {{level: info}}\nhttp: {{addr: {address}}}\n"
            f"storage: {{filesystem: {{rootdirectory: {self.root}/registry}}}}\n"
        )
        if address == LOCKED:
            (self.root / "users").write_text(LOCKED_USER)
            settings += f"auth: {{htpasswd: {{realm: tests, path: {self.root}/users}}}}\n"
        (self.root / f"{name}.yml").write_text(settings)
        return f"docker-registry serve {self.root}/{name}.yml >{self.root}/{name}.log 2>&1"

    def _configure_podman(self) -> None:
        (self.root / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=10000:10000", "nproc=10000:10000"]\n'
            'cgroups = "enabled"\n[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'
        )
        (self.root / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.root}/data"\nrunroot = "{self.root}/run"\n'
        )
        (self.root / "registries.conf").write_text('unqualified-search-registries = ["localhost"]\n')


def _remove_cgroup(top: Path) -> None:
    for _ in range(20):  # the kernel still counts processes that have just died
        for path in sorted((p for p in top.glob("**/") if p.is_dir()), key=lambda p: -len(p.parts)):
            with contextlib.suppress(OSError):
                path.rmdir()
        if not top.exists():
            return
        time.sleep(0.05)


@contextlib.contextmanager
def running(kind: str, root: Path) -> Iterator[Engine]:
    """An engine with the images of this module."""
    if reason := missing(kind):
        pytest.skip(reason)
    engine = Engine(kind, root)
    try:
        try:
            engine.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        engine.load(*images.all_images())
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running("docker", tmp_path_factory.mktemp("docker") / "e") as engine:
        yield engine


@pytest.fixture(scope="session")
def podman_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running("podman", tmp_path_factory.mktemp("podman") / "e") as engine:
        yield engine
