"""Private places that programs enter from outside, as in a container that lives for itself: bubblewrap and nsenter.

For stand-ins of what cannot be had here. The first process is bash, which starts nothing and reaps everything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOREVER = ("/bin/bash", "-c", "while :; do sleep 9999; done")


class Place:
    """Namespaces of their own, where an ordinary user sees the system's programs. Raises `RuntimeError`.

    Args:
        etc: a directory that does not exist yet.
        binds: directories of the host by their path inside; `ro:` in front of the host's makes it read-only.
        alone: without the host's network.
        first: the first process.
    """

    def __init__(
        self,
        etc: Path,
        binds: dict[str, str],
        *,
        alone: bool,
        first: tuple[str, ...] = FOREVER,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
    ) -> None:
        from gristmill.sandbox import system

        etc.mkdir(parents=True)
        system.copy_etc(etc, user="agent", uid=1000, host="place")
        argv = ["bwrap", "--unshare-all", "--unshare-user", *([] if alone else ["--share-net"]), "--cap-drop", "ALL"]
        argv += ["--uid", "1000", "--gid", "1000", "--as-pid-1", "--new-session", *system.binds(), "--proc", "/proc"]
        argv += [*system.kernel_switches(), "--ro-bind", str(etc), "/etc", "--dev", "/dev"]
        argv += ["--tmpfs", "/run", "--tmpfs", "/opt", "--perms", "1777", "--tmpfs", "/tmp", "--tmpfs", "/home"]
        for inside, outside in binds.items():
            argv += ["--ro-bind" if outside.startswith("ro:") else "--bind", outside.removeprefix("ro:"), inside]
        read, write = os.pipe()
        argv += ["--info-fd", str(write), "--remount-ro", "/", "--chdir", "/", *first]
        # It may outlive this process, so it writes to nowhere.
        self.process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[write],
            start_new_session=True,
            env={"PATH": PATH},
        )
        os.close(write)
        with os.fdopen(read) as info:
            said = info.read()
        if not said:
            raise RuntimeError("bubblewrap makes no namespaces here")
        self.pid: int = json.loads(said)["child-pid"]
        self.alone = alone
        end = time.monotonic() + 20
        while Path(f"/proc/{self.pid}/exe").readlink().name != "bash":
            if time.monotonic() > end:
                raise RuntimeError("the place did not become ready")
            time.sleep(0.002)

    def end(self) -> None:
        """End all that is in it."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.process.wait()


def entering(pid: int, alone: bool, variables: dict[str, str], argv: list[str]) -> list[str]:
    """A command line that runs another one in the place of a first process."""
    spaces = ["--user", "--preserve-credentials", "--mount", "--pid", "--ipc", "--uts", *(["--net"] if alone else [])]
    environment = [f"{name}={value}" for name, value in {"PATH": PATH, **variables}.items()]
    return ["nsenter", f"--target={pid}", *spaces, "--wdns=/", "env", "-i", *environment, *argv]
