"""Arguments: what is taken kindly, what is refused, and that nothing raises."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import UsageError
from gristmill.tools.arguments import Arguments, Refusal, compile_schema, parse_arguments, parse_object

SCHEMA = compile_schema(
    {
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "timeout": {"type": "integer", "minimum": 1, "maximum": 600},
            "ratio": {"type": "number"},
            "background": {"type": "boolean"},
            "mode": {"type": "string", "enum": ["fast", "slow"]},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": ["command"],
        "additionalProperties": False,
        "$defs": {"Place": {"type": "object", "properties": {"row": {"type": "integer"}}, "required": ["row"]}},
    }
)
ANYTHING = compile_schema({"type": "object"})


def accepted(raw: object, schema: Any = SCHEMA) -> dict[str, Any]:
    parsed = parse_arguments(raw, schema)
    assert isinstance(parsed, Arguments), parsed
    assert orjson.loads(parsed.text) == parsed.values
    return parsed.values


def refused(raw: object, schema: Any = SCHEMA) -> str:
    parsed = parse_arguments(raw, schema)
    assert isinstance(parsed, Refusal), parsed
    return parsed.reason


@pytest.mark.parametrize("raw", [None, "", "  \n", "null", "{}", '"null"', '""', '"{}"', {}])
def test_nothing_is_an_empty_object(raw: object) -> None:
    assert accepted(raw, ANYTHING) == {}


@pytest.mark.parametrize(
    ("raw", "values"),
    [
        ('{"command": "ls", "timeout": "42"}', {"command": "ls", "timeout": 42}),
        ('{"command": "ls", "timeout": 5.0}', {"command": "ls", "timeout": 5}),
        ('{"command": "ls", "timeout": "5.0"}', {"command": "ls", "timeout": 5}),
        ('{"command": "ls", "ratio": "0.5"}', {"command": "ls", "ratio": 0.5}),
        ('{"command": "ls", "ratio": "3"}', {"command": "ls", "ratio": 3}),
        ('{"command": "ls", "background": "true"}', {"command": "ls", "background": True}),
        ('{"command": "ls", "background": "False"}', {"command": "ls", "background": False}),
        ('{"command": 42}', {"command": "42"}),
        ('{"command": "ls", "timeout": null}', {"command": "ls"}),
        ('{"command": "ls", "maybe": null}', {"command": "ls", "maybe": None}),
        ('{"command": "ls", "maybe": "7"}', {"command": "ls", "maybe": 7}),
        ('{"command": "ls", "lines": "[1, 2]"}', {"command": "ls", "lines": [1, 2]}),
        ('{"command": "ls", "lines": ["1", 2.0]}', {"command": "ls", "lines": [1, 2]}),
        ('{"command": "ls", "place": {"row": "3"}}', {"command": "ls", "place": {"row": 3}}),
        ('{"command": "ls", "place": "{\\"row\\": 3}"}', {"command": "ls", "place": {"row": 3}}),
        ({"command": "ls"}, {"command": "ls"}),
    ],
)
def test_unambiguous_values_are_taken(raw: object, values: dict[str, Any]) -> None:
    taken = accepted(raw)
    assert taken == values
    assert [type(value) for value in taken.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("{}", "required argument 'command' is missing"),
        ('{"command": true}', "'command'"),
        ('{"command": 1.5}', "'command'"),
        ('{"command": null}', "'command'"),
        ('{"command": "ls", "timeout": true}', "'timeout'"),
        ('{"command": "ls", "timeout": "soon"}', "'timeout'"),
        ('{"command": "ls", "timeout": 700}', "maximum of 600"),
        ('{"command": "ls", "timeout": 1e30}', "maximum of 600"),
        ('{"command": "ls", "background": "yes"}', "'background'"),
        ('{"command": "ls", "background": 1}', "'background'"),
        ('{"command": "ls", "mode": "medium"}', "fast"),
        ('{"command": "ls", "lines": [1, "x"]}', "lines[1]"),
        ('{"command": "ls", "place": {}}', "'row' is missing in 'place'"),
        ('{"command": "ls", "timout": 3}', "did you mean 'timeout'?"),
        ('{"command": "ls", "zzz": 3}', "Known are command, timeout"),
    ],
)
def test_refusals_name_the_fault(raw: str, reason: str) -> None:
    assert reason in refused(raw)


@pytest.mark.parametrize("raw", ["[]", "3", "true", '"ls"', '[{"command": "ls"}]', "1.5"])
def test_what_is_no_object_is_refused(raw: str) -> None:
    assert "must be one JSON object" in refused(raw)


@pytest.mark.parametrize(
    "raw", ['{"a": "b', '{"a": ', "{", '{"a": "x\\', '{"a": 12', '{"a": "\\u12', '{"command": "ls", "t', '[{"a": 1}']
)
def test_cut_json_is_named_so(raw: str) -> None:
    assert "probably truncated" in refused(raw)


@pytest.mark.parametrize(
    "raw",
    [
        '{"a": 1 "b": 2}',
        '{"a": 1,}',
        "{'a': 1}",
        '{"a": NaN}',
        '{"a": 1}}',
        '{"a": "x\ny"}',
        '{"a": 1e999}',
        '{"a": \x00}',
        '"{\\"a\\": }"',
    ],
)
def test_other_bad_json_is_refused_with_the_place(raw: str) -> None:
    reason = refused(raw)
    assert "not valid JSON" in reason
    assert "truncated" not in reason


def test_the_echo_is_bounded_and_the_raw_text_is_kept_whole() -> None:
    raw = '{"a": "' + "x" * 100_000
    parsed = parse_arguments(raw, SCHEMA)
    assert isinstance(parsed, Refusal)
    assert len(parsed.reason) < 500
    assert parsed.text == raw


def test_lone_surrogates_become_replacement_characters() -> None:
    assert accepted('{"command": "a\\ud800b"}')["command"] == "a\ufffdb"
    assert accepted('{"command": "a\ud800b"}')["command"] == "a\ufffdb"
    assert accepted('{"command": "\\ud83d\\ude00 \\ud83d \\\\ud83d"}')["command"] == "\U0001f600 \ufffd \\ud83d"
    assert accepted({"command": "a\ud800b"})["command"] == "a\ufffdb"
    refusal = parse_arguments('{"command": \ud800', SCHEMA)
    assert isinstance(refusal, Refusal)
    refusal.text.encode()
    refusal.reason.encode()


def test_values_beyond_what_json_can_say_are_refused_not_raised() -> None:
    assert "too deeply" in refused('{"a": ' + "[" * 500 + "]" * 500 + "}", ANYTHING)
    assert "depth" in refused('{"a": ' + "[" * 5000, ANYTHING)
    recursive = compile_schema(
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"items": {"$ref": "#/$defs/N"}}}}
    )
    assert "too deeply" in refused('{"a": ' + "[" * 1000 + "]" * 1000 + "}", recursive)
    assert "not valid JSON" in refused("1" * 5000, ANYTHING)


def test_equal_schemas_are_compiled_once_and_a_wrong_one_is_an_error() -> None:
    assert compile_schema({"type": "object"}) is compile_schema({"type": "object"})
    with pytest.raises(UsageError, match="not a valid JSON Schema"):
        compile_schema({"type": "no such type"})


def json_values(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | numbers | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )


any_value = json_values(st.integers(-(2**70), 2**70) | st.floats())
plain_value = json_values(st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False))
text_with_surrogates = st.text(st.characters(exclude_categories=()), max_size=60)


@given(text_with_surrogates | text_with_surrogates.map(lambda text: '{"command": "' + text + '"}'))
@settings(max_examples=300, deadline=None)
def test_no_text_raises(raw: str) -> None:
    parse_arguments(raw, SCHEMA).text.encode()
    parse_object(raw)


@given(st.dictionaries(st.sampled_from(list(SCHEMA.parameters["properties"])), any_value, max_size=5))
@settings(max_examples=200, deadline=None)
def test_accepted_values_fit_the_schema_and_refusals_are_text(values: dict[str, Any]) -> None:
    for raw in (json.dumps(values), json.dumps(json.dumps(values)), values):
        parsed = parse_arguments(raw, SCHEMA)
        parsed.text.encode()
        if isinstance(parsed, Arguments):
            assert SCHEMA.validator.is_valid(orjson.loads(parsed.text))


@given(st.dictionaries(st.text(max_size=8), plain_value, min_size=1, max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_every_cut_of_an_object_is_called_truncated(values: dict[str, Any], data: st.DataObject) -> None:
    raw = orjson.dumps(values).decode()
    cut = data.draw(st.integers(1, len(raw) - 1))
    assert "truncated" in refused(raw[:cut], ANYTHING)
