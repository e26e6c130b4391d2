"""Which Chromium there is, and how it is started: confined, without a network, and never outliving its worker.

Where bubblewrap works, the browser lives in namespaces of its own: the system's programs read-only, no home, no file of
the host, a private /tmp, and a network in which there is nothing but the worker's proxy. The proxy gets in there by a
listening socket: the guard, the first program inside, opens it and hands it out through a Unix socket (the door) before
it becomes Chromium. So no trick of a page (WebRTC, QUIC, name lookups) finds a way around the proxy, and when the
worker is killed the kernel ends the whole namespace.

Where bubblewrap does not work, the guard only asks the kernel to be killed with its parent, and the proxy listens on
the host's loopback; Chromium's flags keep pages off other ways out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright

LAUNCH_SECONDS = 30.0
PREFIX = "gristmill-browser-"

_ARGUMENTS = "arguments"  # file of a lair

# The headless shell starts a page in a third of the time and half of the memory of the whole browser.
_NAMES = (
    *("chromium-headless-shell", "chrome-headless-shell"),
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
)
# Where `playwright install` puts its own, likewise.
_OWN = (
    ".cache/ms-playwright/chromium_headless_shell-*/chrome-*/*headless*shell",
    ".cache/ms-playwright/chromium-*/chrome-linux*/chrome",
)
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--no-first-run",
    "--no-pings",
    # WebRTC only through the proxy, which carries no UDP.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    # Names are the proxy's business.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.*",
)
# What of the system Chromium needs to see; missing ones are left out.
_VISIBLE = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/chromium", "/etc/chromium.d"),
    *("/etc/fonts", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/ssl"),
    *("/var/cache/fontconfig", "/sys/devices/system/cpu"),
)
# argv: the door's path or nothing, then the command. PR_SET_PDEATHSIG is 1, SIGKILL 9.
_GUARD = """\
import os, socket, sys
door, command = sys.argv[1], sys.argv[2:]
if door:
    with socket.create_server(("0.0.0.0", 0), backlog=512) as listener, socket.socket(socket.AF_UNIX) as out:
        here = os.getcwd()
        os.chdir(os.path.dirname(door))  # a socket's path has 107 bytes at most, a directory's has not
        out.connect(os.path.basename(door))
        os.chdir(here)
        socket.send_fds(out, [b"!"], [listener.fileno()])
elif sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
os.execv(command[0], command)
"""


@dataclass(frozen=True)
class Confinement:
    """What surrounds the browser: bubblewrap's namespaces, and Chromium's own sandbox around each page."""

    bubblewrap: bool
    chromium: bool


@dataclass(frozen=True)
class Running:
    """A started browser. `listener` is the proxy's socket inside its namespace, None where it has no own."""

    browser: Browser
    confinement: Confinement
    listener: socket.socket | None


def find_executable(settings: Mapping[str, str]) -> str:
    """The path of a Chromium: `BROWSER_EXECUTABLE`, the system's, or Playwright's own; empty where there is none."""
    given = settings.get("BROWSER_EXECUTABLE", "")
    if given:
        return shutil.which(given) or ""
    for name in _NAMES:
        found = shutil.which(name)
        if found:
            return found
    for pattern in _OWN:
        own = sorted(path for path in Path.home().glob(pattern) if os.access(path, os.X_OK))
        if own:
            return str(own[-1])
    return ""


def missing(settings: Mapping[str, str]) -> str:
    """Why the browser cannot work here, with the mend; empty where it can."""
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is not installed: pip install 'gristmill[browser]'"
    if not find_executable(settings):
        given = settings.get("BROWSER_EXECUTABLE", "")
        if given:
            return f"BROWSER_EXECUTABLE={given} is not a program"
        return "no Chromium is installed: apt-get install chromium-headless-shell, or playwright install chromium"
    return ""


def confinements() -> tuple[Confinement, ...]:
    """The ways to start a browser here, safest first; a start takes the first that works.

    Chromium refuses its own sandbox to root outside of bubblewrap, and some kernels refuse it inside.
    """
    ways = [Confinement(True, True), Confinement(True, False)] if _bwrap() else []
    if os.geteuid() != 0:
        ways.append(Confinement(False, True))
    return (*ways, Confinement(False, False))


class Lair:
    """The directory of one worker's browser: its start script, the door, and downloads on their way to a sandbox.

    It is locked while its worker lives, so that `sweep` knows what a killed one left.
    """

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _lock(self.path)
        self.inside = self.path / "inside"  # the only part that the browser sees
        self.downloads = self.inside / "downloads"
        self.downloads.mkdir(parents=True)
        self.arguments = self.path / _ARGUMENTS

    def remove(self) -> None:
        """Remove the directory, and the profile of a browser that did not end well; idempotent."""
        _remove(self.path)
        if self._lock is not None:
            self._lock.close()


def sweep() -> int:
    """Remove what killed workers left in the temporary directory; the number of removed directories."""
    count = 0
    for path in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        # A directory without a lock file may be one that is just being made.
        with contextlib.suppress(OSError):
            if (path / "lock").exists() and (lock := _lock(path)) is not None:
                with lock:
                    _remove(path)
                    count += 1
    return count


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        for argument in (path / _ARGUMENTS).read_text().splitlines():
            name, _, profile = argument.partition("=")
            if name == "--user-data-dir" and Path(profile).name.startswith("playwright_"):
                shutil.rmtree(profile, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


async def launch(playwright: Playwright, executable: str, lair: Lair, way: Confinement) -> Running:
    """Start a browser in one way. Raises `playwright.async_api.Error` or OSError where that does not work."""
    door = lair.inside / "door"
    door.unlink(missing_ok=True)
    guard = [os.path.realpath(sys.executable), "-I", "-S", "-c", _GUARD]
    if way.bubblewrap:
        command = [*_bubblewrap(executable, lair), *guard, str(door), executable]
    else:
        command = [*guard, "", executable]
    script = lair.path / "browser"
    # The arguments are kept for `Lair.remove`: they name the profile, which the driver made and may not live to remove.
    note = shlex.quote(str(lair.arguments))
    script.write_text(f"""#!/bin/sh\nprintf '%s\\n' "$@" >{note}\nexec {shlex.join(command)} "$@"\n""")
    script.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as hatch:
        # By a descriptor: a socket's path has 107 bytes at most, that of a temporary directory may have more.
        folder = os.open(lair.inside, os.O_PATH | os.O_DIRECTORY)
        try:
            hatch.bind(f"/proc/self/fd/{folder}/{door.name}")
        finally:
            os.close(folder)
        hatch.listen(1)
        hatch.setblocking(False)
        browser = await playwright.chromium.launch(
            executable_path=script,
            chromium_sandbox=way.chromium,
            args=list(_FLAGS),
            downloads_path=lair.downloads,
            artifacts_dir=lair.inside,
            # Nothing of the worker's environment; and no connection without a context's own proxy.
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(lair.inside), "LANG": "C.UTF-8"},
            proxy={"server": "http://127.0.0.1:9", "bypass": "<-loopback>"},
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
            timeout=LAUNCH_SECONDS * 1000,
        )
        door.unlink()
        listener = await _receive(hatch) if way.bubblewrap else None
    return Running(browser, way, listener)


async def _receive(hatch: socket.socket) -> socket.socket:
    """The socket that the guard handed out; it did so before it became Chromium."""
    async with asyncio.timeout(LAUNCH_SECONDS):
        connection, _ = await asyncio.get_running_loop().sock_accept(hatch)
    with connection:
        connection.setblocking(True)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError("the browser's guard handed out no socket")
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener


def _bwrap() -> str:
    """Path of bubblewrap, empty where there is none. PyPI's lies beside this Python."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.prefix, "bin"))) or ""


def _bubblewrap(executable: str, lair: Lair) -> list[str]:
    """bubblewrap's part of the command, up to the program to run."""
    command = [
        *(_bwrap(), "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "browser", "--clearenv"),
        *("--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    ]
    for path in _VISIBLE:
        command += ["--ro-bind-try", path, path]
    for path in {sys.base_prefix, str(Path(executable).resolve().parent)}:
        if not path.startswith("/usr/") and path != "/usr":
            command += ["--ro-bind", path, path]
    return [*command, "--bind", str(lair.inside), str(lair.inside), "--chdir", "/tmp", "--"]


def _lock(path: Path) -> IO[Any] | None:
    """The locked lock file of a directory, None where another process holds it."""
    file = (path / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
