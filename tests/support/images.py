"""Images for tests, put together from this machine's programs and the libraries that they need."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

FULL = "gristmill-test/full:1"  # bash, GNU tools, Python; an ordinary user and a WORKDIR
BUSYBOX = "gristmill-test/busybox:1"  # root, no WORKDIR, no bash; an entry point, a command and variables to be kept
ODD = "gristmill-test/odd:1"  # an ordinary user without a WORKDIR; a health check and a volume
NO_TOOLS = "gristmill-test/no-tools:1"  # bash alone
NO_START = "gristmill-test/no-start:1"  # its user does not exist, so its containers can be made and not be started

PROGRAMS = """
bash cat chmod cp cut date dd df echo env false find grep head hostname id killall ln ls mkdir mkfifo mktemp mv nohup
pgrep pkill printf ps pwd readlink rm rmdir sed seq setsid sh sha256sum sleep sort stat sync tail tee timeout touch tr
true uname uniq wc whoami xargs yes
"""
MODULES = "http.server, socket, json, os, sys, time, encodings.idna"
PASSWD = "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"


def _libraries(program: str) -> list[str]:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+) \(0x", said)


class Layer:
    """A file system in a tar archive."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._bytes, mode="w")  # noqa: SIM115 - `image` closes it
        self._seen: set[str] = set()
        for name in ("bin", "dev", "etc", "home", "proc", "run", "sys", "usr", "usr/bin", "var"):
            self.directory(name)
        self.directory("tmp", 0o1777)
        self.text("etc/passwd", PASSWD)
        self.text("etc/group", "root:x:0:\nagent:x:1000:\n")

    def directory(self, name: str, mode: int = 0o755, owner: int = 0) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
        self._tar.addfile(entry)

    def text(self, name: str, content: str) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content.encode()), 0o644
        self._tar.addfile(entry, io.BytesIO(content.encode()))

    def link(self, name: str, target: str) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(entry)

    def file(self, source: str, name: str = "") -> None:
        name = (name or source).lstrip("/")
        if name not in self._seen:
            self._seen.add(name)
            self._tar.add(os.path.realpath(source), name, filter=_as_root)

    def program(self, name: str) -> None:
        path = shutil.which(name)
        if path is None:
            return
        self.file(path, f"bin/{name}")
        for library in _libraries(path):
            self.file(library)

    def python(self) -> None:
        """The system's Python with the few modules that tests use."""
        python = "/usr/bin/python3"
        if not Path(python).exists():
            return
        listing = f"import {MODULES}; print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', 0)))"
        found = subprocess.run([python, "-I", "-c", listing], capture_output=True, text=True, check=True).stdout.split()
        self.file(python)
        for path in [python, *found]:
            self.file(path)
            for library in _libraries(path) if not path.endswith(".py") else ():
                self.file(library)
        self.file(
            subprocess.run(
                [python, "-c", "import os; print(os.__file__)"], capture_output=True, text=True, check=True
            ).stdout.strip()
        )

    def image(self, name: str, **settings: Any) -> bytes:
        """An archive that an engine can load."""
        self._tar.close()
        layer = self._bytes.getvalue()
        config = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            "history": [{"created_by": "tests"}],
        }
        manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for member, content in (
                ("config.json", json.dumps(config).encode()),
                ("layer.tar", layer),
                ("manifest.json", json.dumps(manifest).encode()),
            ):
                entry = tarfile.TarInfo(member)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return packed.getvalue()


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


def full() -> bytes:
    layer = Layer()
    for program in PROGRAMS.split():
        layer.program(program)
    layer.python()
    layer.directory("home/agent", 0o755, 1000)
    layer.directory("workspace", 0o755, 1000)
    return layer.image(FULL, User="agent", WorkingDir="/workspace", Env=["PATH=/usr/local/bin:/usr/bin:/bin"])


def busybox() -> bytes:
    layer = Layer()
    layer.program("busybox")
    applets = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet not in ("busybox", "bash"):
            layer.link(f"bin/{applet}", "busybox")
    return layer.image(BUSYBOX, Env=["PATH=/bin", "KEPT=a b", "LANG=C"], Entrypoint=["/bin/false"], Cmd=["x"])


def odd() -> bytes:
    layer = Layer()
    for program in PROGRAMS.split():
        layer.program(program)
    health = {"Test": ["CMD-SHELL", "touch /tmp/checked"], "Interval": 1_000_000_000}
    return layer.image(ODD, User="1000:1000", Env=["PATH=/bin"], Volumes={"/data": {}}, Healthcheck=health)


def no_tools() -> bytes:
    layer = Layer()
    layer.program("bash")
    return layer.image(NO_TOOLS, Env=["PATH=/bin"])


def no_start() -> bytes:
    layer = Layer()
    layer.program("bash")
    return layer.image(NO_START, User="nobody-here")


def all_images() -> list[bytes]:
    return [full(), busybox(), odd(), no_tools(), no_start()]
