"""The command line of Apptainer or SingularityCE: where it is, its environment, calls, and what dead workers left.

Source: the user guides of Apptainer 1.3 and SingularityCE 4.1, "Running services" and "Limiting container resources".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from gristmill.config import singularity_environment
from gristmill.errors import SandboxError
from gristmill.sandbox.child_stream import ChildStream
from gristmill.sandbox.output import Output
from gristmill.sandbox.owner import is_dead, owner
from gristmill.sandbox.process import run
from gristmill.sandbox.stream import Receiver

STOP_SECONDS = 5.0  # until an instance that was killed must have ended
ASK_SECONDS = 10.0  # for a small question
_NAME = "gristmill_"  # what the names of our instances begin with
INSTALL = "Install Apptainer (apptainer.org) or SingularityCE (sylabs.io), or use another --sandbox."


class Program:
    """The program, and what of this machine's environment it needs. Raises `SandboxError` where there is none."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.env = singularity_environment(environ)
        found = (shutil.which(name, path=self.env.get("PATH")) for name in ("apptainer", "singularity"))
        self.path = next(filter(None, found), "")
        if not self.path:
            raise SandboxError("Neither apptainer nor singularity is in PATH.", INSTALL)
        self._owner = owner()

    @property
    def cache(self) -> Path:
        """Where pulled images are kept."""
        home = self.env.get("HOME", "/nonexistent")
        return Path(self.env.get("XDG_CACHE_HOME") or f"{home}/.cache") / "gristmill" / "images"

    def name(self, token: str) -> str:
        """A name for an instance, which tells whose it is."""
        return f"{_NAME}{self._owner}_{token}"

    async def call(self, *args: str, timeout: float) -> tuple[int, str]:
        """Exit code of a call and what it said; 124 where it was killed after `timeout` seconds."""
        heard = _Heard()
        stream = heard.stream = ChildStream([self.path, *args], self.env, heard)
        stream.write_eof()
        try:
            async with asyncio.timeout(timeout):
                await heard.end
        except TimeoutError:
            return 124, f"no answer within {timeout:g} s"
        finally:
            stream.kill()
        return stream.code, heard.text

    def stop_now(self, name: str) -> None:
        """End an instance, without the event loop; best effort."""
        run([self.path, *_stop(name)], env=self.env, timeout=STOP_SECONDS + 2)
        self.tidy(name)

    async def stop(self, name: str) -> None:
        """End an instance, if there is one. Raises `SandboxError` where that cannot be done."""
        code, said = await self.call(*_stop(name), timeout=STOP_SECONDS + 2)
        self.tidy(name)
        if code and "no instance found" not in said:
            raise SandboxError(f"The instance {name} could not be stopped: {said}.")

    def tidy(self, name: str) -> None:
        """Remove the logs that the program keeps of an instance."""
        for folder in (".apptainer", ".singularity"):
            for log in Path(self.env.get("HOME", "/nonexistent"), folder, "instances").glob(f"logs/*/*/{name}.*"):
                with contextlib.suppress(OSError):
                    log.unlink()

    def leftovers(self) -> list[str]:
        """Names of instances whose worker is no more. Raises `SandboxError`."""
        code, said = run([self.path, "--silent", "instance", "list", "--json"], env=self.env, timeout=ASK_SECONDS)
        try:
            names = [str(found["instance"]) for found in json.loads(said)["instances"]]
        except (ValueError, KeyError, TypeError):
            raise SandboxError(f"{self.path} does not list its instances: {said or code}.") from None
        return [name for name in names if name.startswith(_NAME) and is_dead(name.split("_")[1])]


def _stop(name: str) -> list[str]:
    return ["instance", "stop", "--force", "--timeout", str(int(STOP_SECONDS)), name]


class _Heard(Receiver):
    """All that a call says, within bounds."""

    def __init__(self) -> None:
        super().__init__("")
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._output = Output(2000, 2000)

    @property
    def text(self) -> str:
        return self._output.collect()[0].decode(errors="replace").strip()

    def take(self, data: bytes) -> None:
        self._output.add(data)

    def ended(self, reason: str) -> None:
        super().ended(reason)
        if not self.end.done():
            self.end.set_result(None)


def reap() -> int:
    """Stop the instances of dead workers of this user on this machine; how many. Raises `SandboxError`."""
    program = Program()
    names = program.leftovers()
    for name in names:
        program.stop_now(name)
    return len(names)
