"""A call's arguments: from the raw text that a model sent to values that fit the tool's JSON Schema, or a refusal.

Taken kindly, because it is unambiguous: nothing at all (absent, empty, `null`) is `{}`; an object is taken as it is;
JSON inside a JSON string is decoded; `"42"` is an integer where one is wanted, `"true"` a boolean, `5.0` the integer 5,
`5` the text "5"; `null` for an optional argument is no argument. Nothing else is guessed: a call that does not fit is
refused with a sentence that says why, and the tool does not run.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import orjson

from gristmill.errors import UsageError
from gristmill.tools.text import bounded, json_text, valid_text

ECHO_LIMIT = 200  # characters of the raw text in a refusal
FAULT_LIMIT = 3  # faults named in one refusal
EXACT = 2**53  # integers beyond it are not exact as floats

_ESCAPE = re.compile(
    r"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.S
)
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})(\.0+)?")
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d{1,30})?([eE][+-]?\d{1,2})?")
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}


@dataclass(frozen=True)
class Arguments:
    """Arguments that fit: the values, and the same as one JSON text in fixed form (compact, keys in the order sent)."""

    values: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Refusal:
    """Arguments that do not fit: a sentence for the model, and the raw text as it was sent."""

    reason: str
    text: str


class ArgumentSchema:
    """A tool's JSON Schema, compiled once."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters
        self.validator = jsonschema_rs.validator_for(parameters)


def compile_schema(parameters: dict[str, Any]) -> ArgumentSchema:
    """The compiled schema; the same one for equal schemas. Raises `UsageError` where it is not a JSON Schema."""
    return _compiled(orjson.dumps(parameters))


@functools.lru_cache(maxsize=1024)
def _compiled(parameters: bytes) -> ArgumentSchema:
    try:
        return ArgumentSchema(orjson.loads(parameters))
    except ValueError as error:
        raise UsageError(f"The parameters of a tool are not a valid JSON Schema: {bounded(str(error), 300)}") from error


def parse_arguments(raw: object, schema: ArgumentSchema) -> Arguments | Refusal:
    """The arguments of one call. `raw` is the text that the model sent; None and an object are taken too."""
    values = parse_object(raw)
    if isinstance(values, Refusal):
        return values
    root = schema.parameters
    try:
        values = _fit_object(values, root, root)
        fits = schema.validator.is_valid(values)
        text = orjson.dumps(values).decode()
    except (RecursionError, TypeError, ValueError):  # orjson writes 254 levels, and reads 1,024
        return _refused("The arguments are nested too deeply.", raw)
    if not fits:
        return _refused(f"The arguments do not fit the tool: {_faults(schema, values)}", raw)
    return Arguments(values, text)


def parse_object(raw: object) -> dict[str, Any] | Refusal:
    """The JSON object that the raw arguments hold, not checked against any schema."""
    value = raw
    for _ in range(3):  # the text, JSON inside its string, and once more
        if value is None:
            return {}
        if not isinstance(value, str):
            break
        if not value or value.isspace():
            return {}
        try:
            value = _loads(value)
        except orjson.JSONDecodeError as error:
            if value is not raw and not value.lstrip().startswith(("{", "[")):
                break  # a JSON string that is plain text
            return _refused(_json_fault(value, error), raw)
    if value is None:
        return {}
    if isinstance(value, dict):
        # An object that no JSON parser made may hold anything.
        return orjson.loads(json_text(value)) if value is raw else value
    return _refused(f"The arguments must be one JSON object, not {_kind(value)}.", raw)


def _loads(text: str) -> Any:
    """Strict JSON; only lone surrogates, raw or escaped, are replaced by U+FFFD."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        mended = _ESCAPE.sub(_mend_escape, valid_text(text))
        if mended == text:
            raise
        return orjson.loads(mended)


def _mend_escape(match: re.Match[str]) -> str:
    return "\\ufffd" if len(match[0]) == 6 else match[0]


def _json_fault(text: str, error: orjson.JSONDecodeError) -> str:
    if error.pos >= len(valid_text(text)) and "end of data" in error.msg:
        place = "in the middle of a string" if _ends_inside_string(text) else "before the JSON object is complete"
        return f"The arguments end {place}: the answer was probably truncated. Nothing was run."
    # orjson says "depth limit exceeded", "number is infinity when parsed as double", "unexpected character, …"
    near = text[error.pos : error.pos + 20]
    return f"The arguments are not valid JSON: {error.msg} at character {error.pos}{f' ({near!r})' if near else ''}."


def _ends_inside_string(text: str) -> bool:
    unescaped = re.sub(r"\\.", "", text, flags=re.S)
    return unescaped.count('"') % 2 == 1


def _refused(sentence: str, raw: object) -> Refusal:
    text = valid_text(raw) if isinstance(raw, str) else json_text(raw)
    return Refusal(f"{sentence} You sent: {bounded(text, ECHO_LIMIT)}", text)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    return {str: "a text", list: "an array", dict: "an object", type(None): "null"}.get(type(value), "something else")


# ---- coercion


def _fit_object(values: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return values
    required = schema.get("required", ())
    fitted: dict[str, Any] = {}
    for name, value in values.items():
        wanted = _resolved(properties.get(name), root)
        if wanted is not None:
            value = _fit(value, wanted, root)
            if value is None and name not in required and not _allows_null(wanted, root):
                continue
        fitted[name] = value
    return fitted


def _fit(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> Any:
    types = _types(schema, root)
    kind = type(value)
    if kind is str:
        return value if not types or "string" in types else _fit_text(value, types, schema, root)
    if kind is float:
        exact = "integer" in types and "number" not in types and value.is_integer() and abs(value) < EXACT
        return int(value) if exact else value
    if kind is int:
        return str(value) if types == {"string"} else value
    if kind is dict:
        return _fit_object(value, schema, root)
    if kind is list and (items := _resolved(schema.get("items"), root)) is not None:
        return [_fit(item, items, root) for item in value]
    return value


def _fit_text(text: str, types: frozenset[str], schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A text where none is wanted: what it plainly says, else itself."""
    word = text.strip()
    if "integer" in types and _INTEGER.fullmatch(word):
        return int(word.partition(".")[0])
    if "number" in types and _NUMBER.fullmatch(word):
        return orjson.loads(word)
    if "boolean" in types and word in _BOOLEANS:
        return _BOOLEANS[word]
    if "null" in types and word == "null":
        return None
    if (word[:1] == "[" and "array" in types) or (word[:1] == "{" and "object" in types):
        try:
            inner = _loads(word)
        except orjson.JSONDecodeError:
            return text
        return _fit(inner, schema, root) if not isinstance(inner, str) else text
    return text


def _types(schema: dict[str, Any], root: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a schema takes; empty where it does not say."""
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset((types,))
    if isinstance(types, list):
        return frozenset(types)
    options = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(options, list):
        return frozenset()
    named = [_types(option, root) for option in (_resolved(o, root) for o in options) if option is not None]
    return frozenset().union(*named) if all(named) else frozenset()


def _allows_null(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    types = _types(schema, root)
    return "null" in types if types else None in schema.get("enum", (None,))


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """The schema with a local reference (`#/$defs/Name`) followed; None where it is no object."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        schema = target
    return None


# ---- faults in words


def _faults(schema: ArgumentSchema, values: dict[str, Any]) -> str:
    sentences: list[str] = []
    for error in schema.validator.iter_errors(values):
        sentences.append(_fault(error, schema.parameters))
        if len(sentences) == FAULT_LIMIT:
            break
    return " ".join(sentences)


def _fault(error: jsonschema_rs.ValidationError, schema: dict[str, Any]) -> str:
    kind, kinds = error.kind, jsonschema_rs.ValidationErrorKind
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path).lstrip(".")
    inside = f" in {place!r}" if place else ""
    if isinstance(kind, kinds.Required):
        return f"The required argument {kind.property!r} is missing{inside}."
    if isinstance(kind, kinds.AdditionalProperties):
        known = [] if place else list(schema.get("properties", ()))
        return " ".join(_unknown(name, known, inside) for name in kind.unexpected[:FAULT_LIMIT])
    return f"{place!r}: {bounded(error.message, 200)}." if place else f"{bounded(error.message, 200)}."


def _unknown(name: str, known: list[str], inside: str) -> str:
    shown = repr(bounded(name, 60))
    if not known:
        return f"There is no argument {shown}{inside}."
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"There is no argument {shown}; {hint}Known are {', '.join(known)}."
