"""`gristmill status`: what a run directory holds, and what is still owed."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

from gristmill.cli.console import Lines
from gristmill.cli.figures import clock_time
from gristmill.cli.summary import statistics_lines
from gristmill.errors import SetupError
from gristmill.run.atomic import is_alive
from gristmill.run.manifest import Manifest
from gristmill.run.reader import RunReader
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP


def status(run: str, output_dir: str, as_json: bool) -> int:
    """Print the state of a run, running or not; nothing is written."""
    lines = Lines(sys.stdout)
    with open_run(run, output_dir) as reader:
        figures = latest_statistics(reader)
        manifest, state = reader.manifest, state_of(reader.manifest)
        if as_json:
            lines.document(
                {
                    "directory": str(reader.layout.root),
                    "state": state,
                    "created": manifest.created,
                    "made_by": manifest.made_by,
                    "invocations": len(manifest.invocations),
                    "files": list(reader.layout.written()),
                    "statistics": figures,
                }
            )
            return 0
        made = f"made by {manifest.made_by}" + (f", {manifest.created}" if manifest.created else "")
        lines.write(f"📁 {reader.layout.root}: {state}")
        lines.write(f"   Run {manifest.run_name}, {made}")
        lines.write(f"   Model: {manifest.model}   Distribution: {manifest.distribution}   Seed: {manifest.seed}")
        times = clock_time(manifest.duration_seconds)
        lines.write(f"   Invocations: {len(manifest.invocations)}, {times} altogether")
        for line in statistics_lines(figures):
            lines.write(line)
        for damage in reader.damage():
            lines.write(f"⚠️  {damage.file} line {damage.line} is unreadable ({damage.reason})")
        lines.write("\nFiles")
        for name in reader.layout.written():
            lines.write(f"   {name}")
    return 0


def open_run(run: str, output_dir: str) -> RunReader:
    """The run of that name below the output directory, or in the directory of that name. Raises `SetupError`."""
    below = Path(output_dir) / run
    if not below.is_dir() and not Path(run).is_dir():
        raise SetupError(f"There is no run {run}: neither {below} nor {run} is a directory.")
    return RunReader(below if below.is_dir() else run, tuple(TOOL_TO_TOOLSET_MAP))


def latest_statistics(reader: RunReader) -> dict[str, Any]:
    """Those of the last merge, which know what filters left out; where lines have come since, those of the lines."""
    now, merged = reader.statistics(), reader.merged_statistics()
    return merged if merged is not None and merged.get("attempts") == now["attempts"] else now


def state_of(manifest: Manifest) -> str:
    """Whether somebody works on the run, and how it ended last."""
    if not manifest.invocations:
        return "not started by gristmill"
    last = manifest.invocations[-1]
    if last.ended:
        return f"ended ({last.reason})"
    if last.host == socket.gethostname() and not is_alive(last.pid):
        return "killed; --resume goes on with it"
    return f"running as process {last.pid} on {last.host}"
