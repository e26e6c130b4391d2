"""The host's end of `inside/keeper.sh`, which makes and removes the directories of sandboxes on a remote host."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from typing import NamedTuple, TypeVar

from gristmill.errors import SandboxError
from gristmill.sandbox.inside import SCRIPTS
from gristmill.sandbox.lanes import BOOT
from gristmill.sandbox.ssh_connection import Refused
from gristmill.sandbox.stream import Receiver

ANSWER_SECONDS = 9.0  # the longest that ending a sandbox may take

T = TypeVar("T")


class Found(NamedTuple):
    """A directory on the host, whether its keeper lives, and its label."""

    name: str
    living: bool
    label: str


class Keeper(Receiver):
    """`inside/keeper.sh` of one connection."""

    def __init__(self, host: str) -> None:
        self._token = secrets.token_hex(8)
        super().__init__(self._token)
        loop = asyncio.get_running_loop()
        self.base: asyncio.Future[str] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._host = host
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._listing: asyncio.Future[list[Found]] | None = None
        self._listed: list[Found] = []

    def begin(self, name: str, label: str) -> tuple[list[str], bytes]:
        """Its command line and what its stdin begins with. It makes the directory `name`, which carries the label."""
        scripts = "".join((SCRIPTS / file).read_text() for file in ("processes.sh", "keeper.sh"))
        script = f"token={self._token}\nname={shlex.quote(name)}\nlabel={shlex.quote(label)}\n{scripts}".encode()
        return ["bash", "--norc", "--noprofile", "-c", BOOT, "gristmill", str(len(script))], script

    async def make(self, number: int) -> None:
        """Make the directory of a sandbox. Raises `SandboxError`."""
        await self._ask(f"n {number}", f"m {number}")

    async def end(self, place: str) -> None:
        """End the sandbox of a directory, or all of a keeper's. Raises `SandboxError`."""
        await self._ask(f"e {place}", f"g {place}")

    async def places(self) -> list[Found]:
        """Directories that keepers of the same user made. Raises `SandboxError`."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.get_running_loop().create_future()
            self._listed = []
            self._order("l")
        return await self._within(self._listing)

    async def _ask(self, order: str, answer: str) -> None:
        future = self._answers.get(answer)
        if future is None:
            future = self._answers[answer] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda _: self._answers.pop(answer, None))
            self._order(order)
        await self._within(future)

    def _order(self, line: str) -> None:
        if self.stream and not self.over:
            self.stream.write(line.encode() + b"\n")

    async def _within(self, future: asyncio.Future[T]) -> T:
        await asyncio.wait((future, self.lost), timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            why = "was lost" if self.over else f"did not answer within {ANSWER_SECONDS:g} s"
            raise SandboxError(f"The connection to {self._host} {why}.")
        return future.result()

    # Receiver

    def printed(self, data: bytes) -> None:
        """It says nothing but reports."""

    def reported(self, line: str) -> None:
        verb, _, rest = line.partition(" ")
        if verb == "r" and not self.base.done():
            self.base.set_result(rest)
        elif verb == "e" and not self.base.done():
            self.base.set_exception(Refused(f"{self._host} cannot be used. {rest}"))
        elif verb == "l" and self._listing is not None and not self._listing.done():
            if rest:
                name, living, *label = rest.split(" ", 2)
                self._listed.append(Found(name, living == "1", "".join(label)))
            else:
                self._listing.set_result(self._listed)
        elif (answer := self._answers.get(line)) and not answer.done():
            answer.set_result(None)

    def ended(self, reason: str) -> None:
        super().ended(reason)
        if not self.base.done():
            self.base.set_exception(Refused(f"{self._host} cannot be used: {reason or 'no program could be run'}."))
            self.base.exception()  # whether or not someone waits
        if not self.lost.done():
            self.lost.set_result(None)
