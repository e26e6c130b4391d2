"""Parts of the web, vision and image tests: a folder as the sandbox, and names that resolve as told."""

from __future__ import annotations

import socket
from pathlib import Path

from aiohttp.abc import AbstractResolver, ResolveResult

from gristmill.sandbox.base import Capabilities, ExecResult, Job, Sandbox, SandboxSpec


class FolderSandbox(Sandbox):
    """A folder of this machine, for tools that only read and write files."""

    capabilities = Capabilities(isolated=False, background=False)

    def __init__(self, folder: Path) -> None:
        super().__init__(SandboxSpec(session_id="s", run_id="r"))
        self.workspace = str(folder)

    async def start(self) -> None: ...

    async def exec(
        self, command: str, *, timeout: float, workdir: str = "", stdin: bytes = b"", stateful: bool = True
    ) -> ExecResult:
        raise NotImplementedError("these tools run no command")

    async def spawn(self, command: str, *, workdir: str = "") -> Job:
        raise NotImplementedError("these tools run no command")

    async def read(self, path: str, limit: int) -> bytes:
        with Path(self.workspace, path).open("rb") as file:
            return file.read(limit)

    async def write(self, path: str, data: bytes) -> None:
        file = Path(self.workspace, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    async def stop(self) -> None: ...

    def cleanup(self) -> None: ...


class Names(AbstractResolver):
    """Resolves names to the addresses it was told, one answer after the other, the last one for ever."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        left = self.answers[host.partition(".")[0]]
        addresses = left.pop(0) if len(left) > 1 else left[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None: ...
