"""A model endpoint that says what a script says: a real HTTP server on loopback, for pipelines without a network.

In a test or a program of one's own:

```python
async with ScriptedEndpoint([call("terminal", {"command": "ls"}), say("done")]) as endpoint:
    ...  # --base_url=endpoint.url, any model name, no key
with ScriptedEndpoint(script).in_thread() as endpoint:  # where no event loop runs
    subprocess.run([..., f"--base_url={endpoint.url}"])
```

In a process of its own, which prints its URL in one line and serves until it gets SIGTERM or SIGINT:

    python -m gristmill.testing.endpoint --script script.json --port 0

It speaks OpenAI chat completions (`/v1/chat/completions`, whole and streamed), Anthropic Messages (`/v1/messages`),
`/v1/models`, and `/requests`, which answers `{"count": n, "requests": [the last ones]}`. How scripts look says
`gristmill.testing.script`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from gristmill.testing import wire
from gristmill.testing.script import Script, Turn, call, calls, fail, pick, say, script_from_data

__all__ = ["ScriptedEndpoint", "Seen", "Turn", "call", "calls", "fail", "say"]

_JSON = {"Content-Type": "application/json"}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One request that arrived."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class ScriptedEndpoint:
    """The server. `url` is the base URL to configure; `count` is the number of model requests so far.

    Args:
        script: see `gristmill.testing.script`.
        models: names that `/v1/models` lists; None answers 404 there, as some servers do.
        latency: seconds before every answer.
        api_key: the only key that is let in; empty lets everybody in.
        prefill: number of assistant messages that every request carries before its conversation begins.
        keep: how many of the last requests are kept in `requests`.
    """

    def __init__(
        self,
        script: Script,
        *,
        models: tuple[str, ...] | None = (),
        latency: float = 0.0,
        api_key: str = "",
        prefill: int = 0,
        keep: int = 1000,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.requests: deque[Seen] = deque(maxlen=keep)
        self.count = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.url = ""
        self._script = script
        self._models = models
        self._latency = latency
        self._api_key = api_key
        self._prefill = prefill
        self._address = (host, port)
        self._tries: OrderedDict[int, int] = OrderedDict()
        self._runner: web.ServerRunner | None = None

    async def start(self) -> None:
        """Listen; afterwards `url` is set."""
        # The low-level server: no routing table, which halves the CPU time of a request.
        server = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._address, backlog=4096)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        """Close all connections; idempotent."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve from a thread of its own while the block runs."""
        started = threading.Event()
        loop = asyncio.new_event_loop()
        ending = asyncio.Event()

        problems: list[OSError] = []

        async def serve() -> None:
            try:
                await self.start()
            except OSError as error:
                problems.append(error)
                return
            finally:
                started.set()
            await ending.wait()
            await self.stop()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="scripted-endpoint")
        thread.start()
        started.wait()
        try:
            if problems:
                raise problems[0]
            yield self
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(ending.set)
            thread.join()
            loop.close()

    # -- one request ---------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path.endswith("/requests"):
            seen = {"count": self.count, "requests": list(self.requests)}
            return web.Response(body=msgspec.json.encode(seen), headers=_JSON)
        if self._api_key and not self._admitted(request.headers):
            return _json(401, {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}})
        if path.endswith("/models"):
            if self._models is None:
                return _json(404, {"detail": "Not Found"})
            return _json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self._models]})
        if not path.endswith(("/chat/completions", "/messages")):
            return _json(404, {"error": {"message": f"no such path: {path}"}})
        raw = await request.content.read()  # of any size: `read` of the request stops at 1 MiB
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return _json(400, {"error": {"message": "the body is not JSON"}})
        self.count += 1
        self.requests.append(Seen(path=path, body=body, headers=dict(request.headers)))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            turn = self._failures_first(pick(self._script, body, request.headers, prefill=self._prefill), body)
            return await self._answer(request, turn, body, len(raw))
        finally:
            self.in_flight -= 1

    def _admitted(self, headers: Mapping[str, str]) -> bool:
        return self._api_key in (headers.get("Authorization", "").removeprefix("Bearer "), headers.get("x-api-key"))

    def _failures_first(self, turn: Turn, body: dict[str, Any]) -> Turn:
        if not turn.before:
            return turn
        key = hash(msgspec.json.encode(body.get("messages")))
        tries = self._tries.pop(key, 0)
        self._tries[key] = tries + 1
        if len(self._tries) > 100_000:
            self._tries.popitem(last=False)
        return turn.before[tries] if tries < len(turn.before) else turn

    async def _answer(
        self, request: web.BaseRequest, turn: Turn, body: dict[str, Any], size: int
    ) -> web.StreamResponse:
        if self._latency or turn.latency:
            await asyncio.sleep(self._latency + turn.latency)
        if turn.fault == "reset":
            _reset(request)
            return web.Response()
        if turn.fault == "silent":
            await asyncio.sleep(86_400)
        anthropic = request.path.endswith("/messages")
        headers = {**_JSON, **turn.headers}
        if turn.events is not None:
            chunks = [wire.event(item) for item in turn.events]
            headers["Content-Type"] = "text/event-stream"
        elif turn.body is not None:
            chunks = [_as_bytes(turn.body)]
            if isinstance(turn.body, str) and turn.body.lstrip()[:1] == "<":
                headers["Content-Type"] = turn.headers.get("Content-Type", "text/html")
        elif body.get("stream"):
            chunks = wire.anthropic_events(turn, body, size) if anthropic else wire.chat_events(turn, body, size)
            headers["Content-Type"] = "text/event-stream"
        else:
            whole = wire.anthropic_message(turn, body, size) if anthropic else wire.chat_completion(turn, body, size)
            chunks = [msgspec.json.encode(whole)]
        if len(chunks) == 1 and not turn.drip and not turn.fault:
            return web.Response(status=turn.status, body=chunks[0], headers=headers)
        return await _send(request, turn, chunks, headers)


async def _send(
    request: web.BaseRequest, turn: Turn, chunks: list[bytes], headers: dict[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(status=turn.status, headers=headers)
    await response.prepare(request)
    async for chunk in _paced(b"".join(chunks), turn):
        await response.write(chunk)
    if turn.fault == "cut":
        if request.transport is not None:
            request.transport.abort()
    else:
        await response.write_eof()
    return response


async def _paced(data: bytes, turn: Turn) -> AsyncIterator[bytes]:
    if turn.fault == "cut":
        data = data[: len(data) // 2]
    if not turn.drip:
        yield data
        return
    for position in range(len(data)):
        yield data[position : position + 1]
        await asyncio.sleep(turn.drip)


def _reset(request: web.BaseRequest) -> None:
    transport = request.transport
    if transport is None:
        return
    # Lingering for zero seconds makes the kernel send RST instead of FIN.
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _json(status: int, data: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(data), headers=_JSON)


def _as_bytes(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    return body.encode() if isinstance(body, str) else msgspec.json.encode(body)


async def _serve(endpoint: ScriptedEndpoint) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    async with endpoint:
        print(endpoint.url, flush=True)
        await ending.wait()


def main() -> None:
    """Serve a script file from the command line."""
    parser = argparse.ArgumentParser(prog="python -m gristmill.testing.endpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--script", required=True, help="JSON file, see gristmill.testing.script")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before every answer")
    parser.add_argument("--prefill", type=int, default=0, help="assistant messages that are not part of a conversation")
    options = parser.parse_args()
    script = script_from_data(msgspec.json.decode(Path(options.script).read_bytes()))
    asyncio.run(
        _serve(ScriptedEndpoint(script, port=options.port, latency=options.latency, prefill=options.prefill, keep=100))
    )


if __name__ == "__main__":
    main()
