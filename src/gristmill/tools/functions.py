"""Tools from Python functions: `@tool` reads the schema off the type hints and the docstring.

```python
@tool(toolset="notes")
async def remember(text: str, sandbox: Sandbox, tags: list[str] = []) -> dict[str, Any]:
    \"\"\"Write a note down.

    Args:
        text: what to remember.
        tags: words to find it by.
    \"\"\"
```

A parameter annotated `ToolContext` or `Sandbox` gets the session's and is not shown to the model. Types are those that
msgspec can convert: scalars, lists, dicts, unions, `Literal`, enums, dataclasses, typed dicts, structs; a text in
`Annotated[int, "how many"]` describes a parameter. A function that is not async runs in a thread, which goes on to its
end even where the session is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, overload

import msgspec
import orjson

from gristmill.errors import UsageError
from gristmill.sandbox.base import Sandbox
from gristmill.tools.base import NOTHING, Access, Tool, ToolContext, ToolOutput, Toolset
from gristmill.tools.text import bounded
from gristmill.types import ToolSchema

DEFAULT_TOOLSET = "functions"

_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$")
_NEXT_SECTION = re.compile(r"^[A-Z][A-Za-z ]*:\s*$")
_OTHER_SECTIONS = ("Returns:", "Raises:", "Yields:", "Example:", "Examples:", "Note:", "Notes:")
_ENTRY = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_FIELD = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str = ..., toolset: str = ..., description: str = ..., parallel: bool = ...
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    toolset: str = DEFAULT_TOOLSET,
    description: str = "",
    parallel: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a `Tool` of a function.

    Args:
        name: what the model calls; default is the function's name.
        toolset: the name under which it is offered and counted.
        description: for the model; default is the docstring's text before its `Args:`.
        parallel: True lets calls of one turn overlap; else those of one toolset run in order.

    What the function returns is the result: a dict or a text as it is, anything else as `{"result": …}`. Its exception
    is an error that the model reads. Raises `UsageError` for a function whose parameters cannot be described.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return _make(function, name, toolset, description, parallel)

    return make if function is None else make(function)


def toolset_from(obj: object, name: str = "") -> Toolset:
    """The toolset that a module's attribute stands for: a `Toolset`, a `Tool`, a function, or a list of the last two.

    Args:
        name: the toolset's name; default is that of its first tool.

    Raises:
        UsageError: for anything else, an empty list, and two tools of one name.
    """
    if isinstance(obj, Toolset):
        return obj
    members = list(obj) if isinstance(obj, (list, tuple)) else [obj]
    tools: list[Tool] = []
    for member in members:
        if isinstance(member, Tool):
            tools.append(member)
        elif inspect.isroutine(member):
            tools.append(tool(toolset=name or DEFAULT_TOOLSET)(member))
        else:
            raise UsageError(
                f"{bounded(repr(member), 100)} is no tool.",
                "Give a Toolset, a Tool, a function, or a list of tools and functions.",
            )
    if not tools:
        raise UsageError("The list of tools is empty.")
    names = [each.name for each in tools]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise UsageError(f"Two tools are named {twice}.")
    return Toolset(name=name or tools[0].toolset, tools=tuple(tools))


def _make(function: Callable[..., Any], name: str, toolset: str, description: str, parallel: bool) -> Tool:
    name = name or function.__name__
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise UsageError(f"{name!r} cannot be a tool's name.", "Use letters, digits, _ and -, at most 64.")
    text, described = read_docstring(inspect.getdoc(function) or "")
    given, fields, defaults = _parameters(function, name, described)
    try:
        model = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        parameters = _schema(model, defaults)
    except TypeError as error:
        raise UsageError(f"The parameters of {name} cannot be described: {str(error).splitlines()[-1]}.") from error
    call = _caller(function, model, given)
    if parallel:
        access = NOTHING
    elif given:
        access = Access(("sandbox",), writes=True)
    else:
        access = Access(("toolset", toolset), writes=True)
    return Tool(
        schema=ToolSchema(name=name, description=description or text or name, parameters=parameters),
        toolset=toolset,
        run=call,
        access=lambda arguments: access,
    )


def _parameters(
    function: Callable[..., Any], name: str, described: Mapping[str, str]
) -> tuple[dict[str, Any], list[tuple[str, Any, Any]], dict[str, Any]]:
    """The parameters that the session fills in, those that the model gives as struct fields, and their defaults."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UsageError(f"The type hints of {name} cannot be resolved: {error}.") from error
    given: dict[str, Any] = {}
    fields: list[tuple[str, Any, Any]] = []
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"The parameter {parameter} of {name} cannot be given by its name.")
        hint = hints.get(parameter.name, Any)
        if hint in (ToolContext, Sandbox):
            given[parameter.name] = hint
            continue
        hint = _with_description(hint, described.get(parameter.name, ""))
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint, msgspec.NODEFAULT))
        else:
            fields.append((parameter.name, typing.Union[hint, msgspec.UnsetType], msgspec.UNSET))  # noqa: UP007
            defaults[parameter.name] = parameter.default
    return given, fields, defaults


def _with_description(hint: Any, described: str) -> Any:
    notes = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    text = next((note for note in notes if isinstance(note, str)), described)
    if not text or any(isinstance(note, msgspec.Meta) and note.description for note in notes):
        return hint
    return typing.Annotated[hint, msgspec.Meta(description=text)]


def _schema(model: type[msgspec.Struct], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The struct's JSON Schema as one object, with those defaults that JSON can say."""
    whole = msgspec.json.schema(model)
    definitions: dict[str, Any] = whole["$defs"]
    schema: dict[str, Any] = definitions.pop(whole["$ref"].rpartition("/")[2])
    del schema["title"]
    for name, default in defaults.items():
        try:
            schema["properties"][name]["default"] = orjson.loads(orjson.dumps(default))
        except TypeError:
            continue
    return {**schema, "$defs": definitions} if definitions else schema


def _caller(
    function: Callable[..., Any], model: type[msgspec.Struct], given: Mapping[str, Any]
) -> Callable[[ToolContext, dict[str, Any]], Awaitable[ToolOutput]]:
    is_async = inspect.iscoroutinefunction(function)

    async def call(context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        values = {
            field: value
            for field, value in msgspec.structs.asdict(msgspec.convert(arguments, model)).items()
            if value is not msgspec.UNSET
        }
        for name, kind in given.items():
            values[name] = context if kind is ToolContext else context.sandbox
        output = await function(**values) if is_async else await asyncio.to_thread(function, **values)
        return output if isinstance(output, (dict, str)) else {"result": output}

    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what is said of each parameter, in Google's form (`Args:`) or Sphinx's (`:param x: …`)."""
    description: list[str] = []
    parameters: dict[str, list[str]] = {}
    current: list[str] | None = description
    in_arguments = False
    for line in text.splitlines():
        word = line.strip()
        field = _FIELD.match(word)
        entry = _ENTRY.match(word) if in_arguments else None
        if _SECTION.match(line):
            in_arguments, current = True, None
        elif _NEXT_SECTION.match(line) and (in_arguments or word in _OTHER_SECTIONS):
            in_arguments, current = False, None
        elif field:
            current = parameters.setdefault(field[1], [field[2]])
        elif word.startswith(":"):
            current = None
        elif entry and line.startswith(" ") and not line.startswith("        "):
            current = parameters.setdefault(entry[1], [entry[2]])
        elif current is not None:
            current.append(word)
    return "\n".join(description).strip(), {name: " ".join(lines).strip() for name, lines in parameters.items()}
