"""`gristmill clean`: removes what killed runs left on this machine, and nothing else."""

from __future__ import annotations

import sys

from gristmill.cli.console import Lines
from gristmill.sandbox.reaper import reap


def clean(as_json: bool) -> int:
    """Remove directories and processes of sandboxes whose worker is no more."""
    lines = Lines(sys.stdout)
    removed = reap()
    if as_json:
        lines.document({"removed": removed})
    else:
        lines.write(f"✅ Removed what {removed} killed workers left." if removed else "✅ Nothing was left behind.")
    return 0
