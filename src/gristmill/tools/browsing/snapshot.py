"""A page as text: Playwright's accessibility snapshot, rewritten with `@eN` refs and, where wanted, made compact.

Playwright's form (`aria_snapshot(mode="ai")`) is YAML of lines like `- button "Go" [ref=e20] [cursor=pointer]: text`.
Here that line is `- button @e20 "Go": text`. The compact form leaves out containers without a name, the addresses of
links, and the refs of what nobody would click.
"""

from __future__ import annotations

import re

COMPACT_LIMIT = 8_000  # characters of a compact snapshot
LINE_LIMIT = 300  # characters of one of its lines

INTERACTIVE = frozenset(
    (
        *("button", "checkbox", "combobox", "gridcell", "link", "listbox", "menuitem", "menuitemcheckbox"),
        *("menuitemradio", "option", "radio", "scrollbar", "searchbox", "slider", "spinbutton", "switch"),
        *("tab", "textbox", "treeitem"),
    )
)
# Roles that say nothing without a name or text of their own; what they hold moves up to their place.
_CONTAINERS = frozenset(("generic", "group", "list", "listitem", "none", "paragraph", "presentation", "rowgroup"))
_QUOTED = re.compile(r"'((?:[^']|'')*)'(:.*)?$", re.DOTALL)
_LINE = re.compile(
    r'(?P<role>/?[\w-]+)(?P<label> "(?:[^"\\]|\\.)*")?(?P<marks>(?: \[[^\]]*\])*)(?P<rest>:.*)?$', re.DOTALL
)
_MARK = re.compile(r"\[([^\]]*)\]")
_REF = re.compile(r"@?e(\d{1,9})")
_HERE = "\0"


class Refs:
    """The session's numbers for elements: `@e7` is the same element for as long as it is on a page, and none later.

    Playwright names elements by frame and page (`f3e12`), which models confuse.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> str:
        """The ref of Playwright's."""
        if name not in self._numbers:
            self._names.append(name)
            self._numbers[name] = len(self._names)
        return f"@e{self._numbers[name]}"

    def name(self, ref: str) -> str:
        """Playwright's of a model's, which may lack the `@`; raises `ValueError` for what is none."""
        match = _REF.fullmatch(ref.strip())
        if match is None:
            raise ValueError(f"{ref!r} is not a ref; refs look like @e5 and stand in the snapshot.")
        number = int(match[1])
        if not 0 < number <= len(self._names):
            raise ValueError(f"There is no @e{number}; call browser_snapshot for the refs of now.")
        return self._names[number - 1]


def render(snapshot: str, refs: Refs, *, full: bool) -> tuple[str, int]:
    """The snapshot for a model and the number of refs in it.

    Args:
        snapshot: Playwright's text.
        refs: the session's, to which new elements are added.
        full: everything with all refs and addresses; else compact and at most about `COMPACT_LIMIT` characters.
    """
    lines: list[str] = []
    count = size = left = 0
    last = -1  # indentation of the last line
    above: list[tuple[int, int]] = []  # indentation in Playwright's text and in ours of the lines that hold this one
    for raw in snapshot.split("\n"):
        text = raw.lstrip(" ")
        if not text.startswith("- "):
            if text:
                lines.append(raw)
            continue
        depth = len(raw) - len(text)
        while above and above[-1][0] >= depth:
            above.pop()
        indent = above[-1][1] + 2 if above else 0
        line, name = _line(text[2:], full)
        above.append((depth, indent if line else indent - 2))
        if not line:
            continue
        if not full and size > COMPACT_LIMIT:
            left += 1
            continue
        if indent <= last:
            lines[-1] = lines[-1].removesuffix(":")  # nothing of what it holds is shown
        lines.append(" " * indent + (line.replace(_HERE, refs.number(name), 1) if name else line))
        last = indent
        size += len(lines[-1]) + 1
        count += bool(name)
    if lines:
        lines[-1] = lines[-1].removesuffix(":")
    if left:
        lines.append(f"- … {left} more lines; browser_snapshot with full=true shows everything")
    return "\n".join(lines), count


def _line(text: str, full: bool) -> tuple[str, str]:
    """One line without indentation, empty where it is left out, and Playwright's name of what `_HERE` stands for."""
    quoted = _QUOTED.match(text)
    if quoted:
        text = quoted[1].replace("''", "'") + (quoted[2] or "")
    match = _LINE.match(text)
    if match is None:
        return f"- {text}", ""
    role, label, rest = match["role"], match["label"] or "", match["rest"] or ""
    marks = _MARK.findall(match["marks"])
    ref = next((mark[4:] for mark in marks if mark.startswith("ref=")), "")
    shown = [mark for mark in marks if not mark.startswith("ref=") and mark not in ("cursor=pointer", "active")]
    if not full:
        clickable = role in INTERACTIVE or "cursor=pointer" in marks
        silent = not label and rest in ("", ":") and not clickable
        if role.startswith("/") or (role in _CONTAINERS and silent):
            return "", ""
        if not clickable:
            ref = ""
        if len(rest) > LINE_LIMIT:
            rest = rest[:LINE_LIMIT] + "…"
        if len(label) > LINE_LIMIT:
            label = label[:LINE_LIMIT] + '…"'
    # The ref stands before the label: a label can hold anything, so only there its place is certain.
    return "- " + role + (f" {_HERE}" if ref else "") + label + "".join(f" [{mark}]" for mark in shown) + rest, ref
