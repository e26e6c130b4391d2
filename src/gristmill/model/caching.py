"""Where prompt-cache marks go: Claude and others cache only what ends at a mark, and a session's history only grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gristmill.types import Message

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}


def marked(messages: Sequence[Message]) -> set[int]:
    """The positions whose end is marked, at most three (four are allowed).

    The system message with the tools before it; the last message, for the next request to find; and the message before
    the last answer, which was the last one of the previous request: a mark there finds its cache however many blocks
    the answer and its results have.
    """
    places = {len(messages) - 1} if messages else set()
    if messages and messages[0].role == "system":
        places.add(0)
    last_answer = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].role == "assistant"), 0)
    if last_answer > 0:
        places.add(last_answer - 1)
    return {place for place in places if messages[place].role != "assistant"}
