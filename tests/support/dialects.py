"""One conversation of five turns in the words of every dialect, for real endpoints that are asked in them."""

from __future__ import annotations

import json
from typing import Any

from gristmill.testing.script import Turn, call, say

TURNS = [
    call("terminal", {"command": 'printf "<a>\\n" > ä.txt'}, reasoning="First I write a file."),
    call("read_file", {"path": "ä.txt"}, reasoning="Then I read it.\nIt should hold <a>."),
    call("terminal", {"command": "echo '</tool_call>' 😀"}, reasoning="A nasty one."),
    call("terminal", {"command": "ls"}, reasoning="Nearly done."),
    say("The file holds `<a>`.\n\nThat is all.", reasoning="I have what I need."),
]


def as_hermes(turn: Turn) -> Turn:
    """As a model writes it that knows tags only."""
    text = f"<think>\n{turn.reasoning}\n</think>\n{turn.text}"
    for name, arguments in turn.calls:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        text += f"<tool_call>\n{body}\n</tool_call>"
    return Turn(text=text)


def as_json(turn: Turn) -> Turn:
    """As a model writes it whose answers follow a JSON Schema."""
    said: dict[str, Any] = {"thought": turn.reasoning}
    for name, arguments in turn.calls:
        assert isinstance(arguments, dict)
        said |= {"tool": name, **arguments}
    return Turn(text=json.dumps(said if turn.calls else {**said, "tool": "final", "answer": turn.text}))


DIALECTS: dict[str, tuple[dict[str, Any], list[Turn]]] = {
    "chat": ({"dialect": "chat"}, TURNS),
    "chat-stream": ({"dialect": "chat", "stream": True}, TURNS),
    "anthropic": ({"dialect": "anthropic"}, TURNS),
    "anthropic-stream": ({"dialect": "anthropic", "stream": True}, TURNS),
    "hermes": ({"dialect": "hermes"}, [as_hermes(turn) for turn in TURNS]),
    "hermes-stream": ({"dialect": "hermes", "stream": True}, [as_hermes(turn) for turn in TURNS]),
    "json": ({"dialect": "json"}, [as_json(turn) for turn in TURNS]),
    "json-stream": ({"dialect": "json", "stream": True}, [as_json(turn) for turn in TURNS]),
}
