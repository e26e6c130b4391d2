"""Byte streams to programs in a sandbox whose vendor only runs single commands and returns what they print.

A program's stdin and output are FIFOs there (`inside/polled.sh`). Writing is a command that puts a piece in; reading is
one that waits for the next piece of output, so there is always one under way. All goes as base64, because what commands
print comes back as text. It costs two commands where a stream of the vendor's would cost none.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import secrets
import shlex
from collections.abc import Awaitable, Callable, Sequence

from gristmill.errors import SandboxError
from gristmill.sandbox.inside import SCRIPTS
from gristmill.sandbox.stream import Receiver

INLINE_BYTES = 48 << 10  # that go in a command; its line has 128 KiB at most
PIECE_BYTES = 8 << 20  # that are put at once
WRITE_BYTES = 1 << 20  # that may wait to be written before a writer is held up
BEGIN_SECONDS = 60
WRITE_SECONDS = 60
READ_SECONDS = 90  # there is something to be read every 20
# Waits until there is something, then a little for more, and takes what there is, up to 1 MiB.
_READ = '{ dd bs=65536 count=1; sleep 0.01; dd bs=65536 count=15 iflag=nonblock; } 2>/dev/null <"$1/out" | base64'
# Only where the program lives; as a zombie it does not.
_LIVES = 'read -r pid <"$1/pid" && read -r state <"/proc/$pid/stat" && case ${state##*) } in [ZX]*) false ;; esac'
_TELL = f'{{ {_LIVES} && echo "$2" 1<>"$1/in"; }} 2>/dev/null || echo gone'
_WRITE = 'printf %s "$3" | base64 -d >"$1/$2" && ' + _TELL

Run = Callable[[str, int], Awaitable[str]]  # what a command prints, within seconds; raises SandboxError
Put = Callable[[str, bytes], Awaitable[None]]  # makes a file; raises SandboxError


class PolledStream:
    """stdin of a program; its stdout goes to the receiver. Made by `open`."""

    def __init__(self, run: Run, put: Put, receiver: Receiver) -> None:
        self._run = run
        self._put = put
        self._receiver = receiver
        self._directory = f"/tmp/.gristmill-{secrets.token_hex(8)}"
        self._mark = secrets.token_hex(8)
        self._life, self._end = (f"\0\1{self._mark}{letter}\n".encode() for letter in "te")
        self._rest = b""  # of what was read: the beginning of a mark, perhaps
        self._numbers = itertools.count(1)
        self._waiting = bytearray()
        self._ending = False
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._reading = asyncio.Event()
        self._reading.set()
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, run: Run, put: Put, argv: Sequence[str], receiver: Receiver) -> PolledStream:
        """Start a program. Raises `SandboxError`."""
        stream = cls(run, put, receiver)
        script = (SCRIPTS / "polled.sh").read_text()
        command = ["bash", "-c", script, "gristmill", stream._directory, stream._mark, *argv]
        said = await run(shlex.join(command), BEGIN_SECONDS)
        if said.strip():
            raise SandboxError(f"A program could not be started: {said.strip()[:2000]}.")
        stream._reader = asyncio.ensure_future(stream._read())
        stream._writer = asyncio.ensure_future(stream._write())
        return stream

    def write(self, data: bytes) -> None:
        if not self._ending:
            self._waiting += data
            if len(self._waiting) > WRITE_BYTES:
                self._drained.clear()
            self._wake.set()

    async def drain(self) -> None:
        await self._drained.wait()

    def write_eof(self) -> None:
        self._ending = True
        self._wake.set()

    def pause(self) -> None:
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()

    def _command(self, text: str, *arguments: str) -> str:
        return shlex.join(["sh", "-c", text, "sh", self._directory, *arguments])

    async def _read(self) -> None:
        reason = "its output was cut off"
        try:
            while True:
                await self._reading.wait()
                text = await self._run(self._command(_READ), READ_SECONDS)
                data = base64.b64decode(text)
                if not data:
                    break  # even what watches over the program is gone
                if self._take(data):
                    reason = ""
                    break
        except (SandboxError, binascii.Error) as error:
            reason = str(error)
        finally:
            if self._writer is not None:
                self._writer.cancel()
            self._drained.set()
            self._receiver.ended(reason)

    def _take(self, data: bytes) -> bool:
        """Hand on what is output; whether the end has come."""
        data = (self._rest + data).replace(self._life, b"")
        data, end, _ = data.partition(self._end)
        cut = len(data)
        if not end:
            begin = data.rfind(b"\0", max(0, cut - len(self._life) + 1))
            # Both marks begin alike.
            if begin >= 0 and self._life[:-2].startswith(data[begin : begin + len(self._life) - 2]):
                cut = begin
        self._rest = data[cut:]
        if cut:
            self._receiver.take(data[:cut])
        return bool(end)

    async def _write(self) -> None:
        try:
            while not self._ending or self._waiting:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    piece = bytes(self._waiting[:PIECE_BYTES])
                    del self._waiting[:PIECE_BYTES]
                    await self._give(str(next(self._numbers)), piece)
                    if len(self._waiting) <= WRITE_BYTES:
                        self._drained.set()
            await self._tell(self._command(_TELL, "."))  # end of file
        except SandboxError:
            self.close()

    async def _give(self, name: str, piece: bytes) -> None:
        if len(piece) <= INLINE_BYTES:
            await self._tell(self._command(_WRITE, name, base64.b64encode(piece).decode()))
        else:
            await self._put(f"{self._directory}/{name}", piece)
            await self._tell(self._command(_TELL, name))

    async def _tell(self, command: str) -> None:
        if said := (await self._run(command, WRITE_SECONDS)).strip():
            raise SandboxError(f"The program takes no input: {said}.")
