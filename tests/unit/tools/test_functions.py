"""Tools made of Python functions."""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from typing import Annotated, Any, Literal

import pytest

from gristmill.errors import UsageError
from gristmill.sandbox.base import Sandbox
from gristmill.tools.base import Tool, ToolContext
from gristmill.tools.functions import read_docstring, tool, toolset_from
from support.toolboxes import bench


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@tool
def draw(
    points: list[Point],
    colour: Colour = Colour.RED,
    width: Annotated[int, "In pixels."] = 1,
    style: Literal["solid", "dotted"] = "solid",
    label: str | None = None,
) -> dict[str, Any]:
    """Draw a line.

    It goes through all points.

    Args:
        points: where it goes,
            in order
        colour (Colour): its colour
        label: written beside it

    Returns:
        Not for the model.
    """
    return {"length": len(points), "first": points[0].x, "colour": colour.name, "width": width, "label": label}


def test_the_schema_comes_from_hints_and_docstring() -> None:
    assert draw.schema.description == "Draw a line.\n\nIt goes through all points."
    parameters = draw.schema.parameters
    assert parameters["required"] == ["points"]
    assert parameters["additionalProperties"] is False
    properties = parameters["properties"]
    assert properties["points"]["description"] == "where it goes, in order"
    assert properties["colour"]["description"] == "its colour"
    assert properties["width"] == {"type": "integer", "description": "In pixels.", "default": 1}
    assert properties["style"] == {"enum": ["dotted", "solid"], "default": "solid"}
    assert properties["label"]["default"] is None
    assert parameters["$defs"]["Point"]["required"] == ["x"]


async def test_arguments_arrive_as_the_types_of_the_hints() -> None:
    async with bench(draw, toolsets=()) as made:
        shown = await made.run("draw", points=[{"x": "3"}], colour="blue", width=2.0)
        assert shown == {"length": 1, "first": 3, "colour": "BLUE", "width": 2, "label": None}
        assert (await made.run("draw", points=[{"x": 1}]))["colour"] == "RED"
        refused = await made.result("draw", {"points": [{"x": 1}], "color": "blue"})
        assert not refused.valid
        assert "did you mean 'colour'?" in refused.error


async def test_async_sync_session_and_other_results() -> None:
    @tool(toolset="mine", description="Write a note.")
    async def note(text: str, sandbox: Sandbox, context: ToolContext) -> str:
        await sandbox.write("note", text.encode())
        return f"{context.session_id}: {len(text)}"

    @tool
    def numbers(n: int) -> list[int]:
        return list(range(n))

    @tool
    def nothing() -> None:
        return None

    @tool
    def fails() -> None:
        raise ValueError("not today")

    @tool
    def where() -> str:
        return threading.current_thread().name

    assert list(note.schema.parameters["properties"]) == ["text"]
    assert (note.toolset, note.schema.description) == ("mine", "Write a note.")
    async with bench(note, numbers, nothing, fails, where) as made:
        assert (await made.result("note", {"text": "hello"})).text == "session: 5"
        assert await made.shell("cat note") == "hello"
        assert await made.run("numbers", n=3) == {"result": [0, 1, 2]}
        done = await made.result("nothing", {})
        assert (done.text, done.ok) == ('{"result":null}', True)
        assert (await made.result("fails", {})).error == "not today"
        assert "MainThread" not in (await made.result("where", {})).text


async def test_calls_of_one_toolset_run_in_order_unless_parallel() -> None:
    inside = threading.Semaphore(1)
    together = threading.Barrier(3, timeout=20)

    @tool
    def alone() -> bool:
        free = inside.acquire(blocking=False)
        time.sleep(0.02)
        inside.release()
        return free

    @tool(parallel=True)
    def meet() -> int:
        return together.wait()

    async with bench(alone, meet, toolsets=()) as made:
        results = await made.all(*[("alone", {})] * 3, *[("meet", {})] * 3)
    assert [result.text for result in results[:3]] == ['{"result":true}'] * 3
    assert all(result.ok for result in results[3:])


def test_what_cannot_be_a_tool_is_refused() -> None:
    def stars(*args: int) -> None: ...
    def odd(x: Sandbox | None) -> None: ...
    def unresolved(x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function, reason in ((stars, "by its name"), (odd, "cannot be described"), (unresolved, "cannot be resolved")):
        with pytest.raises(UsageError, match=reason):
            tool(function)
    with pytest.raises(UsageError, match="cannot be a tool's name"):
        tool(name="no blanks")(draw.run.__wrapped__)  # type: ignore[attr-defined]


def test_what_a_module_attribute_stands_for() -> None:
    def plain(x: int) -> int:
        """Double."""
        return 2 * x

    made = toolset_from([draw, plain], name="art")
    assert (made.name, [t.name for t in made.tools]) == ("art", ["draw", "plain"])
    assert toolset_from(made) is made
    assert toolset_from(plain).tools[0].schema.description == "Double."
    assert toolset_from(draw).tools == (draw,)
    for wrong, reason in (([], "empty"), (3, "no tool"), ([draw, draw], "Two tools are named draw")):
        with pytest.raises(UsageError, match=reason):
            toolset_from(wrong)


@pytest.mark.parametrize(
    ("text", "description", "parameters"),
    [
        ("", "", {}),
        ("One line.", "One line.", {}),
        ("Note: this stays.\n\nArgs:\n    a: x", "Note: this stays.", {"a": "x"}),
        (
            "Do.\n\n:param int a: the a\n:param b: the b,\n    and more\n:returns: x",
            "Do.",
            {"a": "the a", "b": "the b, and more"},
        ),
        ("Do.\n\nParameters:\n    a (int, optional): x\n    b: y\n\nRaises:\n    c: z", "Do.", {"a": "x", "b": "y"}),
    ],
)
def test_docstrings(text: str, description: str, parameters: dict[str, str]) -> None:
    assert read_docstring(text) == (description, parameters)


def test_a_tool_stays_a_tool() -> None:
    assert isinstance(draw, Tool)
    assert draw.run.__wrapped__.__name__ == "draw"  # type: ignore[attr-defined]
