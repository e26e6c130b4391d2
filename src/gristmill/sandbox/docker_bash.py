"""A bash for images that have none: this machine's own with its libraries, in a directory of the container."""

from __future__ import annotations

import io
import platform
import re
import shutil
import tarfile
from pathlib import Path

from gristmill.errors import SandboxError
from gristmill.sandbox.process import run

DIRECTORY = "/opt/.gristmill"
PATH_ENTRY = f"{DIRECTORY}/bin"  # where it is called `bash`
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def carried(architecture: str) -> tuple[bytes, tuple[str, ...]]:
    """An archive to be unpacked at /, and the command that is bash then. Raises `SandboxError` where there is none."""
    own = _ARCHITECTURES.get(platform.machine(), platform.machine())
    bash = shutil.which("bash")
    if platform.system() != "Linux" or bash is None or (architecture and architecture != own):
        raise SandboxError("The image has no bash, and this machine has none that would run in it.")
    _, said = run(["ldd", bash], env={}, timeout=10)
    libraries = [Path(found) for found in re.findall(r"(/\S+) \(0x", said)]  # none where it is a static program
    loader = next((path.name for path in libraries if path.name.startswith("ld-")), "")
    program = f"{DIRECTORY}/bash"
    shell = (f"{DIRECTORY}/{loader}", "--library-path", DIRECTORY, program) if loader else (program,)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in (DIRECTORY, PATH_ENTRY):
            _add(archive, name, None)
        for path in (Path(bash), *libraries):
            _add(archive, f"{DIRECTORY}/{path.name}", path.read_bytes())
        _add(archive, f"{PATH_ENTRY}/bash", f'#!/bin/sh\nexec {" ".join(shell)} "$@"\n'.encode())
    return packed.getvalue(), shell


def directory(path: str, mode: int) -> bytes:
    """An archive of one directory, to be unpacked at /."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        _add(archive, path, None, mode)
    return packed.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes | None, mode: int = 0o755) -> None:
    entry = tarfile.TarInfo(name.lstrip("/"))
    entry.mode = mode
    if content is None:
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
    else:
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
