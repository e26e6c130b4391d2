"""One remote host as a worker sees it: as few connections as the host allows, and what they leave when a worker dies.

An SSH server runs a limited number of programs over one connection (`MaxSessions`, usually 10). Where one is full
another is made. Each has a keeper, and on the host a directory that holds the run and the owner in a file `label`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import asyncssh

from gristmill.errors import SandboxError
from gristmill.sandbox.apart import apart
from gristmill.sandbox.owner import is_dead, is_ours, owner
from gristmill.sandbox.reaper import MARK
from gristmill.sandbox.ssh_connection import CONNECT_SECONDS, Refused, SshStream, Target, connect
from gristmill.sandbox.ssh_keeper import Keeper
from gristmill.sandbox.stream import Receiver

TRIES = 3  # of a connection that fails for no lasting reason
PAUSE = 0.5  # seconds before the second one; doubled
APART_SECONDS = 60.0  # for what is done on a connection of its own
_FULL = (asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, asyncssh.OPEN_CONNECT_FAILED, asyncssh.OPEN_RESOURCE_SHORTAGE)

OnLoss = Callable[[str], object]


class Full(SandboxError):
    """The connection takes no further program at present."""


class Connection:
    """One connection and its keeper. `name` is its directory's, `base` the one above it."""

    def __init__(self, target: Target, link: asyncssh.SSHClientConnection, run: str) -> None:
        self.target = target
        self.run = run
        # Short, because the path of a Unix socket has 108 bytes at most.
        self.name = f"gristmill-ssh-{secrets.token_hex(4)}"
        self.base = ""
        self.user = str(link.get_extra_info("username") or "user")
        self.full = False
        self.numbers = itertools.count(1)
        self.keeper = Keeper(target.host)
        self._link = link
        self._streams: set[SshStream] = set()

    @classmethod
    async def open(cls, target: Target, run: str) -> Connection:
        """Connect, and start the keeper. Raises `Refused`, `SandboxError`."""
        connection = cls(target, await connect(target), run)
        keeper = connection.keeper
        argv, script = keeper.begin(connection.name, f"{run} {owner()}")
        try:
            # It may know the variables of the login, of which TMPDIR counts.
            keeper.stream = await connection.stream(["env", f"{MARK}={connection.name}.keeper", *argv], keeper)
            keeper.stream.write(script)
            async with asyncio.timeout(CONNECT_SECONDS):
                connection.base = await keeper.base
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"{target.host} started no program within {CONNECT_SECONDS:g} s.") from None
            raise
        return connection

    @property
    def works(self) -> bool:
        """Whether it can be used."""
        return not self.keeper.over

    async def stream(self, argv: Sequence[str], receiver: Receiver, on_loss: OnLoss = lambda reason: None) -> SshStream:
        """Start a program; `on_loss` is told when the connection is lost. Raises `Full`, `SandboxError`."""

        def ended(stream: SshStream, error: Exception | None) -> None:
            self._streams.discard(stream)
            self.full = False
            if error is not None:
                on_loss(f"The connection to {host} was lost: {error}.")

        stream = SshStream(receiver, ended)
        host, command = self.target.host, f"printf '\\000\\002'; exec {shlex.join(argv)}"
        # Shielded, because a channel whose opening is given up would stay open.
        opening = asyncio.ensure_future(self._link.create_session(lambda: stream, command, encoding=None))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.shield(opening)
        except asyncssh.ChannelOpenError as error:
            if error.code in _FULL and len(self._streams) > 1:
                self.full = True
                raise Full(f"{host} takes no further program: {error.reason}.") from error
            mend = "MaxSessions of its sshd_config must be 2 or more." if error.code in _FULL else ""
            raise SandboxError(f"{host} starts no program: {error.reason}.", mend) from error
        except (OSError, asyncssh.Error) as error:
            opening.add_done_callback(lambda opening: _give_up(opening, stream))
            what = "was lost" if opening.done() else f"started no program within {CONNECT_SECONDS:g} s"
            raise SandboxError(f"The connection to {host} {what}: {error}.") from error
        except BaseException:
            opening.add_done_callback(lambda opening: _give_up(opening, stream))
            raise
        if not receiver.over:
            self._streams.add(stream)
        return stream

    def close(self) -> None:
        """Cut it; its keeper then removes what there is. Without the event loop too, and idempotent."""
        connected = self._link.get_extra_info("socket")
        if connected is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connected.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # its event loop is closed
            self._link.abort()


class Host:
    """The host of a worker's sandboxes. Making it connects to nothing."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._connections: list[Connection] = []
        self._connecting: asyncio.Task[None] | None = None
        self._refused: Refused | None = None
        self._reaped: set[str] = set()
        self._reaping: set[asyncio.Task[int]] = set()

    async def connection(self, run_id: str) -> Connection:
        """One that takes a further program; the first of a run also removes what dead workers of it left.

        Raises `SandboxError`, soon where an earlier call learned that the host cannot be used at all.
        """
        run = re.sub(r"[^A-Za-z0-9.-]+", "-", run_id)[:60]
        while True:
            for connection in self._connections:
                if connection.run == run and connection.works and not connection.full:
                    return connection
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.ensure_future(self._connect(run))
                self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            # Shielded: a session that goes away must not end what others wait for.
            await asyncio.shield(self._connecting)

    async def stream(self, argv: Sequence[str], receiver: Receiver, on_loss: OnLoss, home: Connection) -> SshStream:
        """Start a program on its sandbox's home connection, or where that is full another. Raises `SandboxError`."""
        connection = home
        while True:
            try:
                return await connection.stream(argv, receiver, on_loss)
            except Full:
                connection = await self.connection(home.run)

    async def end(self, place: str, run_id: str) -> None:
        """End a sandbox whose own connection was lost. Raises `SandboxError`."""
        while True:
            connection = await self.connection(run_id)
            try:
                await connection.keeper.end(place)
                return
            except SandboxError:
                if connection.works:
                    raise

    def end_now(self, places: Iterable[str]) -> None:
        """End sandboxes, without the event loop. Raises `SandboxError`."""

        async def work() -> None:
            connection = await Connection.open(Target.of(self._options), "")
            try:
                await asyncio.gather(*(connection.keeper.end(place) for place in places))
            finally:
                connection.close()

        apart(lambda: asyncio.run(work()), APART_SECONDS)

    def close(self) -> None:
        """Cut all connections; the host's ends remove what there is."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        if self._connecting is not None and not self._connecting.done():
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                self._connecting.cancel()

    async def _connect(self, run: str) -> None:
        self._connections = [connection for connection in self._connections if connection.works]
        if self._refused:
            raise self._refused
        for attempt in range(TRIES):
            try:
                connection = await Connection.open(Target.of(self._options), run)
                break
            except Refused as error:
                self._refused = error
                raise
            except SandboxError:
                if attempt == TRIES - 1:
                    raise
            await asyncio.sleep(PAUSE * 2**attempt)
        self._connections.append(connection)
        if run not in self._reaped:
            self._reaped.add(run)
            reaping = asyncio.ensure_future(_reap(connection, run))
            self._reaping.add(reaping)
            reaping.add_done_callback(self._reaping.discard)


def check(options: Mapping[str, str]) -> None:
    """Connect once. Raises `SandboxError` that says why that cannot be done."""

    async def work() -> None:
        (await Connection.open(Target.of(options), "")).close()

    apart(lambda: asyncio.run(work()), APART_SECONDS)


def reap(options: Mapping[str, str]) -> int:
    """Remove what dead workers of this user on this machine left on the host; how many. Raises `SandboxError`."""

    async def work() -> int:
        connection = await Connection.open(Target.of(options), "")
        try:
            return await _reap(connection, None)
        finally:
            connection.close()

    return apart(lambda: asyncio.run(work()), APART_SECONDS)


def _give_up(opening: asyncio.Future[Any], stream: SshStream) -> None:
    """Close what was opened for nobody."""
    if not opening.cancelled() and opening.exception() is None:
        stream.close()


async def _reap(connection: Connection, run: str | None) -> int:
    """Remove what dead workers left: of a run, or of this user on this machine."""
    removed = 0
    with contextlib.suppress(SandboxError):
        for place in await connection.keeper.places():
            theirs, _, label = place.label.partition(" ")
            mine = is_ours(label) if run is None else theirs == run
            if mine and place.name != connection.name and (not place.living or is_dead(label)):
                await connection.keeper.end(place.name)
                removed += 1
    return removed
