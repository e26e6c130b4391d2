"""Whose a container is, and the removal of those whose worker is no more.

Every container carries the labels `gristmill.run`, `gristmill.session` and `gristmill.owner`. The owner names the
worker's process so that it can be told from a later one with the same number, on this machine and in this process
namespace. A container whose owner cannot be judged from here, or is another user's, is never touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import time
from pathlib import Path

from gristmill.errors import SandboxError
from gristmill.sandbox.docker_engine import Address, find, find_all

RUN = "gristmill.run"
SESSION = "gristmill.session"
OWNER = "gristmill.owner"
REMOVE_SECONDS = 9.0


def owner() -> str:
    """What names this process in the label `gristmill.owner`, and within it who asks."""
    parts = _place() | {"pid": str(os.getpid()), "start": _start("self"), "token": secrets.token_hex(4)}
    return " ".join(f"{name}={value}" for name, value in parts.items())


def reap(address: Address | None = None, run_id: str = "") -> int:
    """Remove containers whose worker is no more; how many.

    Args:
        address: the engine; every one that answers on this machine if None.
        run_id: only those of this run.

    Raises `OSError` and `SandboxError`, the latter also where no engine answers.
    """
    labels = [OWNER] + ([f"{RUN}={run_id}"] if run_id else [])
    return sum(
        remove(engine, name)
        for engine in ([address] if address else find_all() or [find()])
        for name, label in _labelled(engine, labels)
        if _is_dead(label)
    )


def remove_of(address: Address, label: str) -> int:
    """Remove whatever carries exactly this owner; how many. Raises `OSError`, `SandboxError`."""
    return sum(remove(address, name) for name, _ in _labelled(address, [f"{OWNER}={label}"]))


def remove(address: Address, name: str, seconds: float = REMOVE_SECONDS) -> bool:
    """Remove a container and wait until it has gone; False where there was none. Raises `OSError`, `SandboxError`."""
    end = time.monotonic() + seconds
    tries = 0
    while True:
        status, said = address.ask("DELETE", f"/containers/{name}", {"force": "true", "v": "true"}, timeout=seconds)
        if status == 404:
            return tries > 0
        tries += 1
        if status < 300:
            continue  # once more, to hear that it has gone
        if time.monotonic() > end:
            raise SandboxError(f"The container {name} could not be removed: {said}.")
        time.sleep(0.05)  # its removal is in progress


def _labelled(address: Address, labels: list[str]) -> list[tuple[str, str]]:
    query = {"all": "true", "filters": json.dumps({"label": labels})}
    status, found = address.ask("GET", "/containers/json", query, timeout=30)
    if status != 200:
        raise SandboxError(f"The container engine lists no containers: {found}.")
    return [(entry["Id"], entry.get("Labels", {}).get(OWNER, "")) for entry in found]


def _is_dead(label: str) -> bool:
    """Whether the process that a label names is certainly no more, and was this user's."""
    theirs = dict(part.partition("=")[::2] for part in label.split())
    ours = _place()
    if any(theirs.get(name) != ours[name] for name in ("uid", "machine")):
        return False
    if theirs.get("boot") != ours["boot"]:
        return True  # the machine has been started anew since
    return theirs.get("pidns") == ours["pidns"] and theirs.get("start") != _start(theirs.get("pid", ""))


def _place() -> dict[str, str]:
    machine = platform.node()
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip() or machine
    boot = pidns = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pidns = str(Path("/proc/self/ns/pid").stat().st_ino)
    # The machine's number is not meant to be told to others as it is.
    return {
        "uid": str(os.getuid()),
        "machine": hashlib.sha256(f"gristmill {machine}".encode()).hexdigest()[:16],
        "boot": boot,
        "pidns": pidns,
    }


def _start(pid: str) -> str:
    """When a process started, in ticks since the machine did; empty where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
