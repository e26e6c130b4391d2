"""Many bug cases in one run: each prompt is named after its case and gets the answers that are listed for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.conversation import parse_gpt, parse_tool
from gristmill.run.reader import RunReader
from gristmill.testing.script import Turn, turn_from_data
from gristmill.types import Message
from support.runs import Place

CASES: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "model_turns.json").read_text())

# The tools that cases call and gristmill does not have.
OWN_TOOLS = '''
def todo_list() -> dict[str, list[str]]:
    """List what is to be done."""
    return {"todo": []}

def look_up(q: str) -> dict[str, str]:
    """Look something up."""
    return {"found": q}

def t1(x: int) -> dict[str, int]:
    """One."""
    return {"x": x}

def t2(y: int) -> dict[str, int]:
    """Two."""
    return {"y": y}

TOOLS = [todo_list, look_up, t1, t2]
'''


def turns(case: str) -> list[Turn]:
    """The answers of a case, exactly as it lists them."""
    return [turn_from_data(data) for data in CASES[case]]


class Answers:
    """A script: each prompt gets its answers in order, one per request, the last one again and again."""

    def __init__(self, answers: Mapping[str, Sequence[Turn]]) -> None:
        self.answers = dict(answers)
        self.requests: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, request: dict[str, Any], headers: Mapping[str, str]) -> Turn:
        prompt = next(m["content"] for m in request["messages"] if m["role"] == "user")
        asked = self.requests.setdefault(prompt, [])
        asked.append(request)
        listed = self.answers[prompt]
        return listed[min(len(asked), len(listed)) - 1]


class CaseRun:
    """What a run of cases left, by the name of the case."""

    def __init__(self, place: Place, answers: Answers, url: str) -> None:
        self.place = place
        self.url = url
        self.answers = answers
        self.rows = {row["conversations"][1]["value"]: row for row in place.merged()}
        self.failures = {line["prompt"]: line for line in place.lines() if line.get("failed")}
        self.statistics = place.statistics()
        self.records: dict[str, dict[str, Any]] = {}
        with RunReader(place.directory) as reader:
            for path in sorted(place.directory.glob("sessions_*.jsonl.zst")):
                for record in reader.records(int(path.name.split("_")[1].split(".")[0])):
                    self.records[record["task"]["text"]] = record

    def said(self, case: str) -> list[Message]:
        """The answers of the model in the row, read back from its text, with the ids of their calls."""
        found = []
        for turn in self.rows[case]["conversations"]:
            if turn["from"] == "gpt":
                message = parse_gpt(turn["value"])
                assert [(c.name) for c in message.tool_calls] == [c["name"] for c in turn["tool_calls"]]
                found.append(message)
        return found

    def calls(self, case: str) -> list[dict[str, str]]:
        """All calls of the row as data."""
        return [call for turn in self.rows[case]["conversations"] for call in turn["tool_calls"]]

    def results(self, case: str) -> list[Any]:
        """The contents of all tool results, matched with their calls."""
        row = self.rows[case]
        answers = [r for t in row["conversations"] if t["from"] == "tool" for r in parse_tool(t["value"])]
        assert [r["tool_call_id"] for r in answers] == [c["id"] for c in self.calls(case)]
        return [r["content"] for r in answers]

    def attempts(self, case: str) -> list[dict[str, Any]]:
        """The requests of the session that failed before one was answered."""
        return [attempt for turn in self.records[case]["turns"] for attempt in turn["reply"].get("attempts", ())]

    def counts(self, case: str, tool: str) -> tuple[int, int, int]:
        """Calls, successes, failures."""
        count = self.rows[case]["tool_stats"][tool]
        return count["count"], count["success"], count["failure"]
