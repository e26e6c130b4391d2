"""SSH: a host whose key was checked, a login without a password, and byte streams to programs there.

Nothing of this machine goes along: no agent, no variables, no terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from gristmill.errors import SandboxError
from gristmill.sandbox.stream import Receiver

CONNECT_SECONDS = 20.0  # for a connection, and again for the login
ALIVE_SECONDS = 15.0  # without a word until the host is asked whether it is there; three times
SAID_BYTES = 2000  # of what a program says before its stream begins, kept for an error
BEGUN = b"\0\2"  # what a login shell prints before the first byte of a stream
QUIET_SECONDS = 0.5  # after the end of a program, for what it has printed
WRITE_BYTES = 1 << 18  # that may wait to be sent before a writer is held up
KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")


class Refused(SandboxError):
    """The host cannot be used for a reason that lasts."""


@dataclass(frozen=True)
class Target:
    """Where to, as whom, and with which key; `user` and `key` may be empty."""

    host: str
    port: int
    user: str
    key: str

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Target:
        """From `TERMINAL_SSH_*`. Raises `SandboxError` where they do not say enough."""
        host, port = options.get("TERMINAL_SSH_HOST", ""), options.get("TERMINAL_SSH_PORT", "0")
        if not host:
            raise Refused("There is no host to use by SSH.", "Name it in TERMINAL_SSH_HOST.")
        if not port.isdecimal() or int(port) > 65535:
            raise Refused(f"TERMINAL_SSH_PORT must be a port's number, not {port!r}.")
        key = options.get("TERMINAL_SSH_KEY", "")
        if key and not Path(key).expanduser().is_file():
            raise Refused(f"TERMINAL_SSH_KEY names a file that does not exist: {key}.")
        return cls(host, int(port), options.get("TERMINAL_SSH_USER", ""), key and str(Path(key).expanduser()))

    def __str__(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


async def connect(target: Target) -> asyncssh.SSHClientConnection:
    """A connection that was checked and logged in. Raises `Refused`, or `SandboxError` where another try may do."""
    settings: dict[str, Any] = {
        "password_auth": False,
        "kbdint_auth": False,
        "agent_forwarding": False,
        "x11_forwarding": False,
        "env": {},
        "send_env": [],
        "compression_algs": None,
        "connect_timeout": CONNECT_SECONDS,
        "login_timeout": CONNECT_SECONDS,
        "keepalive_interval": ALIVE_SECONDS,
        "keepalive_count_max": 3,
    }
    if target.user:
        settings["username"] = target.user
    if target.port:
        settings["port"] = target.port
    if target.key:
        settings |= {"client_keys": [target.key], "agent_path": None}
    try:
        # What ~/.ssh/config says counts too, but not that hosts need not be known.
        known = (await asyncssh.SSHClientConnectionOptions.construct(host=target.host, **settings)).known_hosts
        files = [path for path in map(Path, KNOWN_HOSTS) if path.expanduser().is_file()]
        settings["known_hosts"] = known or [str(path.expanduser()) for path in files] or b""
        return await asyncssh.connect(target.host, **settings)
    except asyncssh.HostKeyNotVerifiable as error:
        where = f"-p {target.port} {target.host}" if target.port else target.host
        raise Refused(
            f"It is not known whether {target.host} is the right host: {error.reason}.",
            f"Compare its key's fingerprint with what its owner says, then: ssh-keyscan {where} >> ~/.ssh/known_hosts",
        ) from error
    except asyncssh.PermissionDenied as error:
        raise Refused(
            f"{target} refuses the login: {error.reason}.",
            "Name the private key's file in TERMINAL_SSH_KEY or add it to ssh-agent, the user in TERMINAL_SSH_USER.",
        ) from error
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise Refused(
            f"The key {target.key or 'in ~/.ssh'} cannot be used: {error}.", "Add one with a passphrase to ssh-agent."
        ) from error
    except (OSError, asyncssh.Error) as error:
        raise SandboxError(f"{target.host} cannot be reached by SSH: {error or type(error).__name__}.") from error


class SshStream(asyncssh.SSHClientSession[bytes]):
    """stdin of a program on the host; its stdout goes to the receiver.

    `on_end` is told when it ends, before the receiver, and the error where the connection was lost.
    """

    def __init__(self, receiver: Receiver, on_end: Callable[[SshStream, Exception | None], None]) -> None:
        self._receiver = receiver
        self._on_end = on_end
        self._channel: asyncssh.SSHClientChannel[bytes] | None = None
        self._begun = False
        self._said = bytearray()
        self._full: asyncio.Future[None] | None = None
        self._paused = False
        self._quiet: asyncio.TimerHandle | None = None  # runs when the program has ended

    # The port.

    def write(self, data: bytes) -> None:
        if self._channel and not self._channel.is_closing():
            self._channel.write(data)

    async def drain(self) -> None:
        if self._full:
            await asyncio.wait((self._full,))

    def write_eof(self) -> None:
        if self._channel and not self._channel.is_closing():
            self._channel.write_eof()

    def pause(self) -> None:
        self._paused = True
        if self._channel and not self._channel.is_closing():
            self._channel.pause_reading()

    def resume(self) -> None:
        self._paused = False
        if self._channel and not self._channel.is_closing():
            self._channel.resume_reading()

    def close(self) -> None:
        if self._channel:
            self._channel.abort()

    # asyncssh.SSHClientSession

    def connection_made(self, channel: asyncssh.SSHClientChannel[bytes]) -> None:
        self._channel = channel
        channel.set_write_buffer_limits(WRITE_BYTES)

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype is not None or not self._begun:
            if len(self._said) < SAID_BYTES:
                self._said += data
            # What start-up files of the login shell print comes first.
            if datatype is not None or BEGUN not in self._said:
                return
            self._begun = True
            before, _, data = bytes(self._said).partition(BEGUN)
            self._said[:] = before
            if not data:
                return
        if self._quiet:
            self._end_soon()
        self._receiver.take(data)

    def pause_writing(self) -> None:
        self._full = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._full:
            self._full.set_result(None)
            self._full = None

    def eof_received(self) -> bool:
        return True  # its stdin may go on

    def exit_status_received(self, status: int) -> None:
        self._end_soon()

    def exit_signal_received(self, signal: str, core_dumped: bool, message: str, lang: str) -> None:
        self._end_soon()

    def connection_lost(self, error: Exception | None) -> None:
        if self._quiet:
            self._quiet.cancel()
        self.resume_writing()
        self._on_end(self, error)
        self._receiver.ended(str(error or "") or self._said.decode(errors="replace").strip())

    def _end_soon(self) -> None:
        """The program has ended; others may hold its output, and the server goes on as long as they do."""
        if self._quiet:
            self._quiet.cancel()
        again = self._end_soon if self._paused else self.close
        self._quiet = asyncio.get_running_loop().call_later(QUIET_SECONDS, again)
