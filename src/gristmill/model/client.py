"""The model of a worker: a dialect over a transport, with retries, admission and prices. It serves all its sessions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from gristmill.errors import ModelError
from gristmill.model import classify, jsontext
from gristmill.model.adaptive import Limiter
from gristmill.model.base import Load, Reply, Request
from gristmill.model.dialect import Dialect
from gristmill.model.pricing import Prices
from gristmill.model.retry import Backoff, with_retries
from gristmill.model.transport import Transport

_DONE = b"[DONE]"


class EndpointModel:
    """One endpoint and model name; the `Model` that all dialects share."""

    def __init__(
        self,
        dialect: Dialect,
        transport: Transport,
        *,
        backoff: Backoff,
        limiter: Limiter,
        prices: Prices,
        stream: bool = False,
        secret: str = "",
    ) -> None:
        self.prices = prices
        self._dialect = dialect
        self._transport = transport
        self._backoff = backoff
        self._limiter = limiter
        self._stream = stream
        self._secret = secret

    @property
    def load(self) -> Load:
        """How many requests are allowed, under way, waiting and refused."""
        return self._limiter.load

    async def complete(self, request: Request) -> Reply:
        """Ask once. Raises `ModelError`."""
        body = self._dialect.encode(request)
        reply, attempts = await with_retries(
            lambda: self._ask(body, request), self._backoff, gate=self._limiter, deadline=request.deadline
        )
        return msgspec.structs.replace(reply, attempts=attempts)

    async def close(self) -> None:
        """Give back connections; idempotent."""
        await self._transport.close()

    async def _ask(self, body: bytes, request: Request) -> Reply:
        begun = time.monotonic()
        try:
            answer = await (self._streamed(body) if self._stream else self._whole(body))
            reply = understand(self._dialect, answer, request)
        except ModelError as error:
            raise classify.scrub(error, self._secret) from error.__cause__
        seconds = time.monotonic() - begun
        usage = await self.prices.priced(reply.usage, raw=reply.raw.get("usage"))
        return msgspec.structs.replace(reply, usage=usage, seconds=seconds)

    async def _whole(self, body: bytes) -> dict[str, Any]:
        return self._parse(await self._transport.post(self._dialect.path, body))

    async def _streamed(self, body: bytes) -> dict[str, Any]:
        collector = self._dialect.collector()
        events = 0
        async with contextlib.aclosing(self._transport.stream(self._dialect.path, body)) as stream:
            async for data in stream:
                if data == _DONE:
                    break
                event = self._parse(data)
                if not events and _is_whole(event):
                    return event
                events += 1
                with _shape(event):
                    collector.feed(event)
        return collector.answer()

    def _parse(self, raw: bytes) -> dict[str, Any]:
        if not raw.strip():
            raise classify.not_an_answer("an empty body", b"")
        try:
            answer = jsontext.decode(raw)
        except ValueError:
            raise classify.not_an_answer("not JSON", raw) from None
        if not isinstance(answer, dict):
            raise classify.not_an_answer("not a JSON object", raw)
        return answer


def understand(dialect: Dialect, answer: dict[str, Any], request: Request) -> Reply:
    """The reply that an answer holds. Raises `ModelError` for an error inside, and for whatever is no answer."""
    with _shape(answer):
        error = classify.inner_error(answer)
        if error is not None:
            raise error
        return dialect.decode(answer, request)


@contextlib.contextmanager
def _shape(answer: dict[str, Any]) -> Iterator[None]:
    """JSON that is shaped unlike any answer (a text where an object should be) is malformed, not an error of ours."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise classify.not_an_answer(f"an answer of an unknown shape ({error!r})", jsontext.encode(answer)) from error


def _is_whole(event: dict[str, Any]) -> bool:
    """True for a plain answer of a server that does not stream."""
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return event.get("type") == "message" or (isinstance(first, dict) and "message" in first and "delta" not in first)
