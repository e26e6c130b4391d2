"""Whole runs as a user starts them: a process of its own, a scripted endpoint, real sandboxes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gristmill.testing.endpoint import call, say
from gristmill.testing.script import Script

FOUR_CALLS: Script = [
    call("terminal", {"command": "echo one > file; cat file"}, reasoning="first"),
    call("terminal", {"command": "cat file"}, reasoning="second"),
    call("write_file", {"path": "b.txt", "content": "two"}, reasoning="third"),
    call("read_file", {"path": "b.txt"}, reasoning="fourth"),
    say("done", reasoning="fifth"),
]


class Place:
    """A directory with a dataset, and the command line to run it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "data" / "r"
        self.temp = root / "tmp"
        self.temp.mkdir()

    def dataset(self, *rows: dict[str, Any] | str) -> Path:
        path = self.root / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": r} if isinstance(r, str) else r) + "\n" for r in rows))
        return path

    def command(self, url: str, *flags: str, batch_size: int = 5) -> list[str]:
        given = {flag.partition("=")[0] for flag in flags}
        usual = {
            "--dataset_file": str(self.root / "prompts.jsonl"),
            "--batch_size": str(batch_size),
            "--run_name": "r",
            "--output_dir": str(self.root / "data"),
            "--distribution": "terminal_only",
            "--model": "scripted",
            "--base_url": url,
            "--num_workers": "2",
            "--seed": "7",
        }
        return (
            [sys.executable, "-m", "gristmill", "run"]
            + [f"{name}={value}" for name, value in usual.items() if name not in given]
            + list(flags)
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temp), "CANARY_API_KEY": "sk-canary-1234567890"}

    def start(self, url: str, *flags: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(url, *flags, **options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            cwd=self.root,
        )

    def run(self, url: str, *flags: str, status: int | None = 0, **options: Any) -> str:
        """Run to the end; asserts the exit status and returns what was printed."""
        done = subprocess.run(
            self.command(url, *flags, **options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            cwd=self.root,
            timeout=120,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout
        return done.stdout

    def lines(self) -> list[dict[str, Any]]:
        """All lines of all batch files."""
        paths = sorted(self.directory.glob("batch_*.jsonl"), key=lambda p: int(p.stem.split("_")[1]))
        return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]

    def merged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "trajectories.jsonl").read_bytes().splitlines()]

    def statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "statistics.json").read_text())
        return found


def every_byte_of(directory: Path) -> bytes:
    """The content of all files below a directory, session records decompressed."""
    import zstandard

    found = b""
    for path in directory.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".zst":
                with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
                    data = reader.read()
            found += data
    return found
