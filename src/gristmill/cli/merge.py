"""`gristmill merge`: batch files into trajectories.jsonl once more, with other filters if asked."""

from __future__ import annotations

import sys

import msgspec

from gristmill import events
from gristmill.cli.console import Lines
from gristmill.cli.progress import filtered_line
from gristmill.cli.status import open_run
from gristmill.cli.summary import statistics_lines
from gristmill.config import RunConfig
from gristmill.quality.filters import parse_filters
from gristmill.run.lock import Lock


def merge(run: str, output_dir: str, filters: str | None, as_json: bool) -> int:
    """Merge a run that nobody is working on. `filters` None are those that the run was started with."""
    lines = Lines(sys.stdout)

    def tell(event: events.Event) -> None:
        if isinstance(event, events.Filtered) and not as_json:
            lines.write(filtered_line(event))

    with open_run(run, output_dir) as reader:
        usual = reader.manifest.settings.get("filters", RunConfig(dataset_file="", batch_size=1, run_name="").filters)
        active = parse_filters(usual if filters is None else filters)
        lock = Lock(reader.layout.lock)
        try:
            reader.refresh()
            report = reader.merge(active, tell)
        finally:
            lock.release()
        if as_json:
            document = msgspec.to_builtins(report)
            document.pop("statistics")
            lines.document(document)
            return 0
        lines.write(f"✅ {report.rows} trajectories from {report.files} batch files: {reader.layout.trajectories}")
        lines.write(
            f"   Left out: {report.discarded} discarded, {report.failed} failed, {report.replaced} replaced, "
            f"{len(report.unreadable)} unreadable"
            + "".join(f", {count} by {name}" for name, count in report.filtered.items())
        )
        for line in statistics_lines(report.statistics):
            lines.write(line)
    return 0
