"""`gristmill distributions`: what there is, and what drawing from it gives."""

from __future__ import annotations

import sys

from gristmill.cli.console import Lines
from gristmill.cli.flags import Kind, read_value
from gristmill.cli.summary import table
from gristmill.distribution import (
    find_distribution,
    frequencies,
    load_distributions,
    render_distribution,
    render_list,
)
from gristmill.errors import UsageError


def distributions(name: str | None, draws: str, seed: str, distributions_file: str | None, as_json: bool) -> int:
    """List all distributions, or draw from one."""
    lines = Lines(sys.stdout)
    # Any name of a toolset is taken here: those of --tools are known to a run only, which checks all names.
    known = load_distributions(distributions_file)
    if name is None:
        if as_json:
            lines.document({key: known[key].plain() for key in sorted(known)})
        else:
            lines.write(render_list(known))
        return 0
    times = read_value(Kind.WHOLE, "draws", draws)
    if times < 1:
        raise UsageError(f"--draws must be a whole number of at least 1, not {times}.")
    distribution = find_distribution(known, name)
    exact = distribution.chances()
    drawn = frequencies(distribution, times, read_value(Kind.WHOLE, "seed", seed))
    if as_json:
        lines.document({"name": name, "draws": times, "drawn": drawn, "exact": exact})
        return 0
    lines.write(render_distribution(distribution))
    lines.write(f"\n{times} draws, percent of the sessions that have it")
    rows = [(key, f"{drawn[key]:.2f}", f"{percent:.2f}") for key, percent in exact.items()]
    for line in table([("", "drawn", "exact"), *rows]):
        lines.write(line)
    return 0
