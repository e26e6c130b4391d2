"""The sandbox port: one private place per session for commands and files. Adapters: `bubblewrap`, `host`, …

Contract, which the conformance suite in `gristmill.testing` checks for every adapter:
- `start` is called once. If it raises, `stop` is still called and must clean up what there is.
- One persistent shell: the working directory and exported variables that a stateful `exec` leaves are there for the
  next one. A command that exits, kills its shell or times out does not end the sandbox; the next one works.
- stdin of a command is `stdin`, then end of file. stdout and stderr arrive in one stream, in order.
- A command ends when its shell ends, whether or not background children still hold its output. They go on running, can
  go on writing (to nowhere), and die with the sandbox.
- On timeout the whole process tree of the command is killed, also children in sessions of their own; earlier background
  jobs live on. The result has `timed_out=True`, `exit_code=124` and what was printed until then.
- Output is kept as its first `OUTPUT_HEAD` and last `OUTPUT_TAIL` bytes; `dropped` says how many bytes lie between.
  Memory stays bounded however much is printed.
- Cancelling any await leaves the sandbox stoppable; `stop` is idempotent, shielded from cancellation, bounded by
  `STOP_SECONDS`, and afterwards no process, mount or directory of the sandbox exists. `cleanup` is the synchronous last
  resort for a dying process.
- Nothing of the runner's environment enters; only `SandboxSpec.env`.
- Raises `errors.SandboxError` when the sandbox itself is at fault, `FileNotFoundError`, `IsADirectoryError` and
  `PermissionError` for files, never for a command that merely fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import msgspec

from gristmill.types import Limits

OUTPUT_HEAD = 200_000  # bytes kept from the beginning of a command's output
OUTPUT_TAIL = 300_000  # bytes kept from its end
STOP_SECONDS = 10.0
HIDDEN = "hidden"  # among a provider's options


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a session asks of its sandbox. `cwd` empty is the sandbox's own workspace; `env` adds to its fixed one."""

    session_id: str
    run_id: str
    image: str = ""
    cwd: str = ""
    env: dict[str, str] = {}
    network: bool = False
    limits: Limits = Limits()


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of sandbox can do; checked before the run."""

    isolated: bool
    instant: bool = False  # starts in milliseconds, so that keeping some ready gains nothing
    images: bool = False  # takes SandboxSpec.image
    network_switch: bool = False  # can be with and without network
    limits: frozenset[str] = frozenset()  # names of the fields of Limits that it enforces on this machine
    background: bool = True


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a command gave. `output` is raw bytes: where `dropped` > 0, a head of `OUTPUT_HEAD`, then the tail.

    `exit_code` is the shell's: 128+n for a command killed by signal n, 124 on timeout.
    `note` is a sentence about something the user should know (the working directory had vanished, say), else empty.
    """

    output: bytes
    exit_code: int
    dropped: int = 0
    timed_out: bool = False
    note: str = ""
    seconds: float = 0.0


class Job(ABC):
    """A background command. `output` is bounded like a command's."""

    id: str
    pid: int  # inside the sandbox
    command: str
    started: float  # time.time()

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs."""

    @abstractmethod
    def output(self) -> tuple[bytes, int]:
        """All kept output so far and the number of dropped bytes, as in `ExecResult`."""

    @abstractmethod
    async def wait(self, timeout: float) -> bool:
        """Wait for the end for up to `timeout` seconds; True if it has ended."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to its stdin; raises BrokenPipeError where it is closed or the job has ended."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """End of file on its stdin; idempotent."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill its whole process tree; idempotent."""


class Sandbox(ABC):
    """One private place. Made with a spec, started once, stopped once."""

    capabilities: Capabilities
    workspace: str = "/workspace"  # absolute path, inside; the first working directory unless spec.cwd is set

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        workdir: str = "",
        stdin: bytes = b"",
        stateful: bool = True,
    ) -> ExecResult:
        """Run a command of the session's shell (bash).

        Args:
            command: shell text; NUL bytes raise ValueError.
            timeout: seconds of wall time.
            workdir: directory for this command (relative to the shell's), whose change is kept only if the command
                itself changes it; missing → exit code 1 and nothing runs. Empty is the shell's current one.
            stdin: what the command can read.
            stateful: False runs in the shell's directory and environment but leaves no change of them; such calls
                may run while a stateful one does.
        """

    @abstractmethod
    async def spawn(self, command: str, *, workdir: str = "") -> Job:
        """Start a background command in the shell's directory and environment."""

    @abstractmethod
    async def read(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes of a file; a relative path is taken from the shell's working directory."""

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Replace a file's content, making its parents; keeps the mode of an existing file."""

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    def cleanup(self) -> None:
        """Synchronous and best-effort: what `stop` does, for a process that is about to end."""


class SandboxProvider(Protocol):
    """What makes the sandboxes of one kind for one worker; making it starts nothing.

    `options` are what the run's settings hold for this kind, `config.SandboxConfig.options`: hosts, users, key files;
    and under `HIDDEN` a directory of this machine, the output root, that no kind may show inside.
    `capabilities` of the class say what the kind can do, those of what was made what it can do on this machine.
    """

    capabilities: Capabilities

    def __init__(self, *, options: Mapping[str, str]) -> None: ...

    @staticmethod
    def problem(options: Mapping[str, str]) -> str:
        """Why this kind cannot work on this machine, with the mend; empty where it works. Really tries it once."""
        ...

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that was not started. Raises `errors.SandboxError` for a spec that this kind cannot serve."""
        ...

    def close(self) -> None:
        """Remove what is left of its sandboxes, synchronously; idempotent."""
        ...
