"""`host`: no isolation. Commands run as the user who runs gristmill, in a private working directory.

The environment is made, as everywhere, so no key of the runner's enters; but commands can read and change what the user
can. When the session ends all that it started is found by its mark and killed, whatever session or parent it has by
then; only a process that cleared its own environment escapes that.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from gristmill.sandbox.base import Capabilities, SandboxSpec
from gristmill.sandbox.inside import Inside
from gristmill.sandbox.process import kill_marked, run
from gristmill.sandbox.reaper import MARK
from gristmill.sandbox.shell import ShellSandbox, ShellSandboxes

BASH = "/bin/bash"


class HostSandbox(ShellSandbox):
    """A working directory on this machine, and a shell."""

    capabilities = Capabilities(isolated=False, instant=True)

    def _inside(self, directory: Path, memory: Path) -> Inside:
        for path in (memory / "state", directory / "workspace", directory / "home", directory / "tmp"):
            path.mkdir(mode=0o700)
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
        return Inside(
            io=f"{memory}/io",
            state=f"{memory}/state",
            workspace=f"{directory}/workspace",
            home=f"{directory}/home",
            temp=f"{directory}/tmp",
            user=user,
            mark=self._mark(directory),
        )

    def _argv(self, directory: Path, memory: Path, inside: Inside) -> list[str]:
        return [BASH, "--norc", "--noprofile", f"{inside.io}/init"]

    def _destroy(self, directory: Path) -> None:
        kill_marked(MARK, self._mark(directory))

    def _mark(self, directory: Path) -> str:
        return f"{self._place.token}.{directory.name}."


class HostSandboxes(ShellSandboxes):
    """Makes the host sandboxes of one worker."""

    capabilities = HostSandbox.capabilities

    @staticmethod
    def problem(options: Mapping[str, str] = {}) -> str:
        """Why commands cannot be run here, with the mend; empty where they can."""
        code, said = run([BASH, "-c", "[[ -r /proc/self/environ ]]"], env={}, timeout=10)
        return f"{BASH} does not work here: {said or code}. Install bash, and mount /proc." if code else ""

    def _make(self, spec: SandboxSpec) -> ShellSandbox:
        return HostSandbox(spec, self._place, self._limits)
