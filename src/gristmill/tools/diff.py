"""A unified diff of two texts, quick enough for a shared event loop."""

from __future__ import annotations

import difflib
import re

DIFF_LINES = 4_000  # lines up to which a minimal diff is sought


def unified_diff(before: str | None, after: str | None, path: str, new_path: str = "") -> str:
    """A unified diff with three lines of context; None is a file that is not there.

    Quick also where two long texts differ in few places, since only what lies between their common ends is compared.
    """
    old, new = _diff_lines(before), _diff_lines(after)
    shorter = min(len(old), len(new))
    lead = next((place for place in range(shorter) if old[place] != new[place]), shorter)
    trail = next((place for place in range(shorter - lead) if old[-1 - place] != new[-1 - place]), shorter - lead)
    first, context = max(0, lead - 3), max(0, trail - 3)
    old, new = old[first : len(old) - context], new[first : len(new) - context]
    if len(old) + len(new) <= DIFF_LINES:
        body = list(difflib.unified_diff(old, new, lineterm="", n=3))[2:]
        body = [_moved(line, first) if line.startswith("@@") else line for line in body]
    else:
        # A minimal diff of two long texts can take seconds; this one is valid too.
        lead, trail = lead - first, trail - context
        body = [f"@@ -{first + 1},{len(old)} +{first + 1},{len(new)} @@"]
        body += [" " + line for line in old[:lead]]
        body += ["-" + line for line in old[lead : len(old) - trail]]
        body += ["+" + line for line in new[lead : len(new) - trail]]
        body += [" " + line for line in old[len(old) - trail :]]
    names = (f"a/{path.lstrip('/')}", f"b/{(new_path or path).lstrip('/')}")
    header = [
        f"--- {names[0] if before is not None else '/dev/null'}",
        f"+++ {names[1] if after is not None else '/dev/null'}",
    ]
    return "\n".join(header + body)


def _diff_lines(text: str | None) -> list[str]:
    if not text:
        return []
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    else:
        lines[-1] += "\n\\ No newline at end of file"
    return lines


def _moved(header: str, lines: int) -> str:
    """A hunk header whose line numbers count from the whole text instead of from a part of it."""

    def shifted(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) + lines}"

    return re.sub(r"([-+])(\d+)", shifted, header)
