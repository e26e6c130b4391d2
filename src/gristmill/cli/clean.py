"""`gristmill clean`: removes what killed runs left on this machine, and nothing else."""

from __future__ import annotations

import sys

from gristmill import plugins
from gristmill.cli.console import Lines
from gristmill.errors import GristmillError

# What may be left of a worker that is no more, and what removes it.
_LEFTOVERS = {
    "directories": "gristmill.sandbox.reaper:reap",
    "cgroups": "gristmill.sandbox.cgroups:reap",
    "browsers": "gristmill.tools.browsing.chromium:sweep",
    "containers": "gristmill.sandbox.docker_leftovers:reap",
    "instances": "gristmill.sandbox.singularity_program:reap",
    "remote directories": "gristmill.sandbox.ssh:reap",
    "sandboxes of Modal": "gristmill.sandbox.modal:reap",
    "sandboxes of Daytona": "gristmill.sandbox.daytona:reap",
}


def clean(as_json: bool) -> int:
    """Remove directories, processes and containers of sandboxes whose worker is no more."""
    lines = Lines(sys.stdout)
    removed: dict[str, int] = {}
    unseen: dict[str, str] = {}
    for name, place in _LEFTOVERS.items():
        try:
            removed[name] = plugins.find("sandboxes", place)()
        except (GristmillError, OSError) as error:
            unseen[name] = str(error)  # no engine here, or no library for it
    if as_json:
        lines.document({"removed": removed, "not_looked_at": unseen})
        return 0
    for name, count in removed.items():
        lines.write(f"✅ {name}: {f'{count} removed' if count else 'nothing was left behind'}")
    for name, reason in unseen.items():
        lines.write(f"– {name}: not looked at. {reason}")
    return 0
