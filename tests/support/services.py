"""Services that tools call, on loopback: a server that draws, and an MCP server over HTTP."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MCP_SERVER = str(Path(__file__).parents[1] / "unit" / "tools_mcp" / "server.py")


class ImageServer:
    """Draws with Pillow behind OpenAI's `/images/generations`; it is no image model.

    A prompt that says `echo` is refused with the key it came with, as careless services do.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.url = ""

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[ImageServer]:
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append((dict(self.headers), body))
                if "echo" in body["prompt"]:
                    said = f"no right for {self.headers['Authorization']}"
                    return self._answer(400, {"error": {"message": said}})
                return self._answer(200, {"data": [{"b64_json": base64.b64encode(drawn(body["size"])).decode()}]})

            def _answer(self, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def drawn(size: str, colour: str = "green") -> bytes:
    """A PNG of one colour."""
    from PIL import Image

    width, height = map(int, size.split("x"))
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


@contextlib.contextmanager
def mcp_over_http() -> Iterator[str]:
    """The test MCP server in a process of its own; gives its URL."""
    process = subprocess.Popen(
        [sys.executable, MCP_SERVER, "http", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
