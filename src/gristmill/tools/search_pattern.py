"""Regular expressions and globs of search_files: one dialect, whichever program does the search.

The dialect is that of ripgrep (Rust's `regex`): `\\d \\w \\s \\b`, groups, classes, lazy quantifiers; no look-around,
no back-references. It is taken a little more kindly: a `{` that begins no count is a brace, and an escaped character
without a meaning is itself. For sandboxes without ripgrep the same pattern is said as a POSIX extended expression.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COUNT = re.compile(r"\{\d+(,\d*)?\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\}")
_FLAGS = re.compile(r"\(\?i\)")
_NAMED = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
_UNICODE_CLASS = re.compile(r"\\[pP](\{[^}]*\}|[A-Z])")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_SHORT = {"d": "0-9", "w": "[:alnum:]_", "s": "[:space:]"}
_RUST_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~")
_POSIX_SPECIAL = frozenset("\\.+*?()|[]{}^$")


@dataclass(frozen=True)
class Pattern:
    """One expression in both forms; `posix` is None where only ripgrep can say it."""

    rust: str
    posix: str | None
    ignore_case: bool


class _OnlyRust(Exception):
    """What follows cannot be said as a POSIX expression."""


class _Reader:
    """Walks over an expression and says it in both forms."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.rust: list[str] = []
        self.posix: list[str] | None = []

    def read(self) -> Pattern:
        ignore_case = bool(_FLAGS.match(self.text))
        if ignore_case:
            self.at = 4
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\":
                self._escape()
            elif character == "[":
                self._class()
            elif character == "(":
                self._group()
            elif character == "{" or character == "}":
                count = _COUNT.match(self.text, self.at)
                self._quantifier(count[0]) if count else self._put("\\" + character, "\\" + character, 1)
            elif character in "*+?":
                self._quantifier(character)
            elif character == "\n":
                raise ValueError("The pattern holds a line break: search_files matches within one line.")
            else:
                self._put(character, character, 1)
        posix = None if self.posix is None else "".join(self.posix)
        return Pattern(("(?i)" if ignore_case else "") + "".join(self.rust), posix, ignore_case)

    def _put(self, rust: str, posix: str | None, length: int) -> None:
        self.rust.append(rust)
        if posix is None:
            self.posix = None
        elif self.posix is not None:
            self.posix.append(posix)
        self.at += length

    def _literal(self, character: str, length: int) -> None:
        if character in "\n\0":
            raise ValueError("The pattern holds a line break or NUL: search_files matches within one line of text.")
        rust = "\\" + character if character in _RUST_SPECIAL else character
        self._put(rust, "\\" + character if character in _POSIX_SPECIAL else character, length)

    def _quantifier(self, sign: str) -> None:
        length = len(sign)
        lazy = self.text[self.at + length : self.at + length + 1] == "?"  # which lines match does not depend on it
        self._put(sign, sign, length + lazy)

    def _group(self) -> None:
        rest = self.text[self.at : self.at + 4]
        named = _NAMED.match(self.text, self.at)
        if rest.startswith("(?:"):
            self._put("(?:", "(", 3)
        elif named:
            self._put("(?:", "(", len(named[0]))
        elif rest.startswith(("(?=", "(?!", "(?<")):
            raise ValueError("Look-around such as (?=…) is not supported in patterns.")
        elif rest.startswith("(?"):
            self._put("(?", None, 2)
        else:
            self._put("(", "(", 1)

    def _escape(self) -> None:
        code = _CODE.match(self.text, self.at + 1)
        character = self.text[self.at + 1 : self.at + 2]
        if not character:
            raise ValueError("The pattern ends with a single backslash.")
        if code:
            self._literal(_character(code), 1 + len(code[0]))
        elif character in "123456789":
            raise ValueError("Back-references such as \\1 are not supported in patterns.")
        elif character in _SHORT:
            self._put("\\" + character, f"[{_SHORT[character]}]", 2)
        elif character.lower() in _SHORT:
            self._put("\\" + character, f"[^{_SHORT[character.lower()]}]", 2)
        elif character in "bB":
            self._put("\\" + character, "\\" + character, 2)
        elif character in "<>":
            self._put("\\b", "\\" + character, 2)
        elif character in "Az":
            self._put("\\" + character, "^" if character == "A" else "$", 2)
        elif character in _CONTROLS:
            self._literal(_CONTROLS[character], 2)
        elif unicode_class := _UNICODE_CLASS.match(self.text, self.at):
            self._put(unicode_class[0], None, len(unicode_class[0]))
        elif character.isalnum() and character.isascii():
            raise ValueError(f"\\{character} has no meaning in patterns.")
        else:
            self._literal(character, 2)

    def _class(self) -> None:
        """One bracket expression; ripgrep gets it as it is but for line breaks."""
        start = self.at
        end = _class_end(self.text, start)
        # No searched line holds a line break, and ripgrep takes none.
        inner = _ESCAPE.sub(lambda match: "" if match[0] == "\\n" else match[0], self.text[start + 1 : end])
        length = end + 1 - start
        if inner in ("", "^"):
            return self._put(".", ".", length) if inner else self._literal("\n", length)
        try:
            posix: str | None = _posix_class(inner)
        except _OnlyRust:
            posix = None
        return self._put(f"[{inner}]", posix, length)


def read_pattern(text: str) -> Pattern:
    """The expression in both forms. Raises ValueError, with a sentence, for what the dialect does not have."""
    return _Reader(text).read()


def _character(code: re.Match[str]) -> str:
    number = int(code[1] or code[2] or code[3], 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise ValueError(f"\\{code[0]} is no character.")
    return chr(number)


def _class_end(text: str, start: int) -> int:
    at = start + 1
    if text[at : at + 1] == "^":
        at += 1
    if text[at : at + 1] == "]":
        at += 1
    depth = 1
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
            if not depth:
                return at
        at += 1
    raise ValueError("The pattern has a '[' without its ']'.")


def _posix_class(inner: str) -> str:
    """A bracket expression in POSIX form, where `]` stands first, `-` last, `^` not first and a backslash is itself."""
    negated = inner.startswith("^")
    at = 1 if negated else 0
    items: list[str] = []
    literal: set[str] = set()
    while at < len(inner):
        named = _POSIX_CLASS.match(inner, at)
        if named:
            items.append(named[0])
            at += len(named[0])
            continue
        if inner[at] == "[" or inner[at : at + 2] in ("&&", "--", "~~"):
            raise _OnlyRust
        first, at = _member(inner, at)
        if len(first) > 1:
            items.append(first)
        elif inner[at : at + 1] == "-" and at + 1 < len(inner):
            last, at = _member(inner, at + 1)
            if len(last) > 1 or first in "]-[\\" or last in "]-[\\":
                raise _OnlyRust
            items.append(f"{first}-{last}")
        else:
            literal.add(first)
    special = "".join(sign for sign in "[^-" if sign in literal)
    plain = "".join(sorted(literal - set("[]^-")))
    if not items and not plain and "]" not in literal and special.startswith("^") and not negated:
        return "\\^" if special == "^" else "[-^]"
    return f"[{'^' if negated else ''}{']' if ']' in literal else ''}{''.join(items)}{plain}{special}]"


def _member(inner: str, at: int) -> tuple[str, int]:
    """One member of a class from `at` on, a character or what a short class stands for, and where the next begins."""
    if inner[at] != "\\":
        return inner[at], at + 1
    code = _CODE.match(inner, at + 1)
    if code:
        return _character(code).replace("\0", "\1"), at + 1 + len(code[0])  # no searched line holds NUL
    character = inner[at + 1]
    if character in _SHORT:
        return _SHORT[character], at + 2
    if character in _CONTROLS:
        return _CONTROLS[character], at + 2
    if character.isalnum():
        raise _OnlyRust
    return character, at + 2


# ---- globs


def quote_posix(text: str) -> str:
    """The text as a POSIX expression that matches just it."""
    return "".join("\\" + sign if sign in _POSIX_SPECIAL else sign for sign in text)


def expand_braces(glob: str) -> list[str]:
    """`*.{ts,tsx}` as `*.ts` and `*.tsx`; at most 64 globs."""
    found = re.search(r"\{([^{}]*,[^{}]*)\}", glob)
    if not found:
        return [glob]
    before, after = glob[: found.start()], glob[found.end() :]
    options = [before + option + after for option in found[1].split(",")]
    return [expanded for option in options for expanded in expand_braces(option)][:64]


def glob_to_posix(glob: str) -> str:
    """A glob over a path as a POSIX extended expression: `**/` is any folders or none, `*` stays within one name."""
    out: list[str] = []
    at = 0
    while at < len(glob):
        if glob.startswith("**/", at):
            out.append("(.*/)?")
            at += 3
        elif glob.startswith("**", at):
            out.append(".*")
            at += 2
        elif glob[at] in "*?":
            out.append("[^/]*" if glob[at] == "*" else "[^/]")
            at += 1
        elif glob[at] == "[" and "]" in glob[at + 2 :]:
            end = glob.index("]", at + 2)
            inner = glob[at + 1 : end]
            out.append("[" + ("^" + inner[1:] if inner.startswith("!") else inner) + "]")
            at = end + 1
        else:
            out.append("\\" + glob[at] if glob[at] in _POSIX_SPECIAL else glob[at])
            at += 1
    return "".join(out)
