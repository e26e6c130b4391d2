"""What a sandbox holds when it starts: the supervisor's scripts, the paths inside, and the first environment.

```
<io>/   init enter        the supervisor, and what each command's shell begins with
        env               the exported variables that the first command starts from
        reports           FIFO of the supervisor's and the shells' reports
        <id>.sh .in .out  one call: its text, its stdin, FIFO of its output
```
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import SandboxError

SCRIPTS = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What every command starts with: nothing asks, pages, colours or waits for a terminal.
ENVIRONMENT: Mapping[str, str] = {
    "PATH": PATH,
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "SHELL": "/bin/bash",
    "SHLVL": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Inside:
    """Paths as they are inside. `mark` begins the value of `SBX_CALL` where processes have no namespace.

    `bounds` is shell text that each command runs first: limits that it cannot lift again. `most` is the number of
    processes that it allows, if it does.
    """

    io: str
    state: str
    workspace: str
    home: str
    temp: str
    user: str
    mark: str = ""
    bounds: str = ""
    most: int = 0


def prepare(io: Path, inside: Inside, cwd: str, variables: Mapping[str, str]) -> None:
    """Fill a new directory with what the supervisor needs. Raises `SandboxError` for a variable bash cannot have."""
    io.mkdir(mode=0o700)
    settings = {
        "io": inside.io,
        "state": inside.state,
        "mark": inside.mark,
        "bounds": inside.bounds,
        "most": str(inside.most or ""),
        "workspace": inside.workspace,
        "home": inside.home,
        "cwd": cwd,
    }
    header = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    scripts = ("processes.sh", "supervisor.sh")
    (io / "init").write_text(header + "".join((SCRIPTS / name).read_text() for name in scripts))
    (io / "enter").write_bytes((SCRIPTS / "enter.sh").read_bytes())
    own = {"HOME": inside.home, "TMPDIR": inside.temp, "USER": inside.user, "LOGNAME": inside.user}
    lines = []
    for name, value in {**ENVIRONMENT, **own, **variables}.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise SandboxError(f"{name!r} cannot be a variable of the sandbox's shell.")
        lines.append(f"export {name}={shlex.quote(value)}\n")
    (io / "env").write_bytes("".join(lines).encode("utf-8", "replace"))


@dataclass(frozen=True)
class StreamInside:
    """Where things are inside, for a sandbox that is reached by byte streams.

    `io` is a directory of ours, `shell` the command that is bash, `cwd` where the first command runs; `mark` as above.
    `limited` says that there is a limit on processes; `prelude` is shell text that every program of ours begins with,
    where `first` is set in the sandbox's first one only.
    """

    io: str
    workspace: str
    cwd: str
    shell: tuple[str, ...] = ("bash",)
    mark: str = ""
    limited: bool = False
    prelude: str = ""


def exports(variables: Mapping[str, str]) -> str:
    """Shell text that exports these. Raises `SandboxError` for a variable bash cannot have."""
    lines = []
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise SandboxError(f"{name!r} cannot be a variable of the sandbox's shell.")
        lines.append(f"export {name}={shlex.quote(value)}\n")
    return "".join(lines)


def stream_script(inside: StreamInside, token: str, name: str, variables: Mapping[str, str | int]) -> str:
    """The text of `lane` or `job` with all that it needs, to be run with `-c`."""
    settings = {
        "io": inside.io,
        "token": token,
        "mark": inside.mark,
        "workspace": inside.workspace,
        "cwd": inside.cwd,
        "limited": "1" if inside.limited else "",
        "enter": (SCRIPTS / "enter.sh").read_text(),
        **variables,
    }
    header = "".join(f"{key}={shlex.quote(str(value))}\n" for key, value in settings.items())
    scripts = ("processes.sh", "stream.sh", f"{name}.sh")
    header += f"shell=({shlex.join(inside.shell)})\n{inside.prelude}"
    return header + "".join((SCRIPTS / file).read_text() for file in scripts)
