"""A dialect: how one kind of endpoint is spoken to. To add one, write this and give it a line in `select`."""

from __future__ import annotations

from typing import Any, Protocol

from gristmill.model.base import Reply, Request


class Collector(Protocol):
    """Puts the events of one stream together."""

    def feed(self, event: dict[str, Any]) -> None:
        """Take the next event. Raises `ModelError` for an error inside."""
        ...

    def answer(self) -> dict[str, Any]:
        """What a plain request would have got. Raises `ModelError` where the stream ended too early."""
        ...


class Dialect(Protocol):
    """Pure: requests to bytes, answers to replies. It knows no transport, no retries, no money."""

    path: str  # under the base URL

    def headers(self) -> dict[str, str]:
        """What every request carries, the key included."""
        ...

    def encode(self, request: Request) -> bytes:
        """The body of a request."""
        ...

    def collector(self) -> Collector:
        """For a streamed answer."""
        ...

    def decode(self, answer: dict[str, Any], request: Request) -> Reply:
        """The reply that an answer holds. Raises `ModelError` where it holds none."""
        ...
