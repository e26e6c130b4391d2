"""`ssh`: a private directory on one remote host for every session. No isolation from the user who logs in there.

The environment is made, as everywhere, and all that a session started is found by its mark and killed when it ends, as
with `host`; when the connection or the worker is lost, by what watches over the connection on the remote host.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shlex
import weakref
from collections.abc import Mapping, Sequence

from gristmill.config import sandbox_from_environment
from gristmill.errors import SandboxError
from gristmill.sandbox import ssh_host
from gristmill.sandbox.base import Capabilities, Sandbox, SandboxSpec
from gristmill.sandbox.inside import ENVIRONMENT, PATH, StreamInside, exports
from gristmill.sandbox.lanes import LaneSupervisor
from gristmill.sandbox.reaper import MARK
from gristmill.sandbox.ssh_host import Connection, Full, Host
from gristmill.sandbox.stream import Receiver, Stream
from gristmill.sandbox.supervised import SupervisedSandbox

MOST_LOSSES = 2  # of connections while a sandbox starts
END_SECONDS = 9.0  # for a further connection, where the sandbox's own was lost


class SshSandbox(SupervisedSandbox):
    """A directory on the remote host, and a shell."""

    capabilities = Capabilities(isolated=False)

    def __init__(self, spec: SandboxSpec, host: Host) -> None:
        super().__init__(spec)
        self._host = host
        self._begun = False
        self._home: Connection | None = None
        self.place = ""  # its directory, as the keepers know it; empty while there is none
        self._running: LaneSupervisor | None = None
        self._stopping: asyncio.Future[None] | None = None

    async def start(self) -> None:
        if self._begun or self._stopping is not None:
            raise SandboxError("A sandbox starts once.")
        self._begun = True
        exports(self.spec.env)
        losses = 0
        while True:
            home = self._home = await self._host.connection(self.spec.run_id)
            number = next(home.numbers)
            self.place = f"{home.name}/s-{number}"
            try:
                await home.keeper.make(number)
                running = self._running = LaneSupervisor(self._connect, self._inside(home))
                await running.start()
                return
            except Full:
                await home.keeper.end(self.place)
            except SandboxError:
                losses += 1
                if home.works or losses > MOST_LOSSES:
                    raise  # else its connection was lost, which takes what there is with it

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    def cleanup(self) -> None:
        if self._running is not None:
            self._running.stop()
        if self.place:
            with contextlib.suppress(SandboxError):
                self._host.end_now([self.place])
                self.place = ""

    def _inside(self, home: Connection) -> StreamInside:
        directory = f"{home.base}/{self.place}"
        self.workspace = f"{directory}/workspace"
        own = {"HOME": f"{directory}/home", "TMPDIR": f"{directory}/tmp", "USER": home.user, "LOGNAME": home.user}
        variables = exports({**ENVIRONMENT, **own, **self.spec.env})
        make = f"mkdir -m 700 -- {shlex.join(f'{directory}/{name}' for name in ('io', 'workspace', 'home', 'tmp'))}"
        return StreamInside(
            io=f"{directory}/io",
            workspace=self.workspace,
            cwd=posixpath.normpath(posixpath.join(self.workspace, self.spec.cwd)),
            mark=self._mark,
            prelude=f"unset {MARK}\n{variables}[[ ${{first-}} ]] && {make}\n",
        )

    @property
    def _mark(self) -> str:
        return self.place.replace("/", ".") + "."

    async def _connect(self, argv: Sequence[str], receiver: Receiver) -> Stream:
        assert self._home is not None and self._running is not None
        running = self._running
        program = ["env", "-i", f"PATH={PATH}", f"{MARK}={self._mark}lane", *(argv or running.first_argv)]
        if argv:
            return await self._host.stream(program, receiver, running.fail, self._home)
        return await self._home.stream(program, receiver, running.fail)

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
        if self._home is None or not self.place:
            return
        try:
            await self._home.keeper.end(self.place)
        except SandboxError:
            if self._home.works:
                raise
            try:
                async with asyncio.timeout(END_SECONDS):
                    await self._host.end(self.place, self.spec.run_id)
            except TimeoutError:
                raise SandboxError(f"Whether {self.place} was removed on the host is not known.") from None
        self.place = ""


class SshSandboxes:
    """Makes the sandboxes of one worker on a remote host.

    Args:
        options: `TERMINAL_SSH_HOST`, `_USER`, `_PORT` and `_KEY`.
    """

    capabilities = SshSandbox.capabilities

    def __init__(self, *, options: Mapping[str, str] = {}) -> None:
        self._host = Host(options)
        self._made: weakref.WeakSet[SshSandbox] = weakref.WeakSet()

    @staticmethod
    def problem(options: Mapping[str, str] = {}) -> str:
        """Why the host cannot be used, with the mend; empty where it can."""
        try:
            ssh_host.check(options)
        except SandboxError as error:
            return str(error)
        return ""

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started. Raises `SandboxError` for a spec with an image."""
        if spec.image:
            raise SandboxError("A remote host has no images.", "Use --sandbox=docker for rows with an image.")
        sandbox = SshSandbox(spec, self._host)
        self._made.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Remove what is left, synchronously; idempotent."""
        places = [sandbox.place for sandbox in self._made if sandbox.place]
        if places:
            with contextlib.suppress(SandboxError):
                self._host.end_now(places)
        self._host.close()


def reap() -> int:
    """Remove what dead workers of this user on this machine left on the host of `TERMINAL_SSH_HOST`; how many."""
    return ssh_host.reap(sandbox_from_environment(kind="ssh").options)
