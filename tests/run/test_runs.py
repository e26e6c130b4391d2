"""Whole runs through the command line: rows, numbers, resume, isolation, bad endpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from gristmill.conversation import parse_tool
from gristmill.testing.endpoint import ScriptedEndpoint, call, calls, fail, say
from gristmill.trajectory import Row, decode_row
from support.runs import FOUR_CALLS, Place, every_byte_of

KEYS = list(Row.__struct_fields__)
CANARY = "sk-canary-1234567890"


def test_rows_numbers_and_console_add_up(place: Place, endpoint: ScriptedEndpoint) -> None:
    """ST-05, ST-06: rows, statistics and console agree, and a second start asks nothing."""
    place.dataset(*(f"task {n}" for n in range(12)))
    printed = place.run(endpoint.url)
    rows = place.merged()
    assert len(rows) == 12 and all(list(row) == KEYS for row in rows)
    row = rows[0]
    assert row["outcome"] == "completed" and row["completed"] and not row["partial"]
    assert row["api_calls"] == 5 and row["toolsets_used"] == ["terminal", "file"]
    assert row["tool_stats"]["terminal"] == {"count": 2, "success": 2, "failure": 0}
    assert row["tool_stats"]["browser_click"] == {"count": 0, "success": 0, "failure": 0}
    assert row["reasoning_stats"]["turns_with_reasoning"] == 5
    assert row["usage"]["prompt_tokens"] > 0 and row["usage"]["completion_tokens"] > 0
    speakers = [turn["from"] for turn in row["conversations"]]
    assert speakers == ["system", "human", *["gpt", "tool"] * 4, "gpt"]
    assert (
        '"output": "one\\n"' in row["conversations"][3]["value"]
        or '"output": "one"' in row["conversations"][3]["value"]
    )
    statistics = place.statistics()
    assert statistics["tool_statistics"]["terminal"]["count"] == 24
    assert statistics["reconcile"]["kept"] == 12
    for words in (
        "🔄 Batch 0: Starting (5 prompts)",
        "✅ Batch 2: Completed (2 prompts processed)",
        "✅ Prompt 11 completed",
        "BATCH PROCESSING COMPLETE",
        "Tool Usage Statistics",
        "Reasoning Coverage",
    ):
        assert words in printed
    before = (place.directory / "trajectories.jsonl").read_bytes()
    assert endpoint.count == 60
    again = place.run(endpoint.url, "--resume")
    assert "✅ All prompts have already been processed!" in again and "RESUME SUMMARY" in again
    assert endpoint.count == 60
    assert (place.directory / "trajectories.jsonl").read_bytes() == before


def test_sb_05_sb_09_sessions_see_neither_each_other_nor_a_key(place: Place) -> None:
    """SB-05, SB-09: no file, variable, process or port of another session, no key of the runner."""
    look = (
        "cat /tmp/x ./w 2>&1; echo var=$LEAK; ps ax 2>/dev/null | grep -c '[s]leep 4242'; "
        "(exec 3<>/dev/tcp/127.0.0.1/8099) 2>&1 && echo connected; env; cat /proc/*/environ | tr '\\0' '\\n'; "
        "ls -a / /root /home 2>&1"
    )
    script = {
        "leaves": [
            call("terminal", {"command": "echo secret > /tmp/x; echo secret > w; export LEAK=leaked; sleep 4242 &"}),
            call("terminal", {"command": "python3 -m http.server 8099 --directory /tmp", "background": True}),
            call(
                "terminal",
                {
                    "command": "for i in $(seq 50); do (exec 3<>/dev/tcp/127.0.0.1/8099) 2>/dev/null && "
                    "echo answers && break; sleep 0.1; done; echo var=$LEAK"
                },
            ),
            call("terminal", {"command": "sleep 3"}),
            say("done", reasoning="r"),
        ],
        "looks": [
            call("terminal", {"command": "sleep 1.5"}),
            call("terminal", {"command": look}),
            say("ok", reasoning="r"),
        ],
    }
    place.dataset("leaves", "looks", {"prompt": "looks from /tmp", "cwd": "/tmp"})
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url, "--num_workers=1", "--concurrency=3")
    rows = {row["prompt_index"]: row for row in place.merged()}
    left = rows[0]["conversations"]
    assert "answers" in left[7]["value"] and "var=leaked" in left[7]["value"]
    for index in (1, 2):
        seen = rows[index]["conversations"][5]["value"]
        assert "secret" not in seen and "leaked" not in seen and "connected" not in seen
        assert "var=\\n0" in seen
        assert str(place.root) not in seen and "CANARY" not in seen
    assert CANARY.encode() not in every_byte_of(place.root / "data")
    assert CANARY not in printed


@pytest.mark.parametrize("workers", [1, 4])
def test_the_same_seed_draws_the_same_toolsets(place: Place, endpoint: ScriptedEndpoint, workers: int) -> None:
    file = place.root / "own.toml"
    file.write_text('[mine]\ndescription = "d"\ntoolsets = {terminal = 50, file = 50}\n')
    prompts = [f"task {n}" for n in range(20)]
    if workers == 4:
        prompts.reverse()
    place.dataset(*prompts)
    place.run(
        endpoint.url,
        f"--num_workers={workers}",
        "--distribution=mine",
        f"--distributions_file={file}",
        "--filters=none",
    )
    drawn = {row["conversations"][1]["value"]: row["toolsets_used"] for row in place.merged()}
    kinds = sorted({tuple(v) for v in drawn.values()})
    assert len(drawn) == 20 and len(kinds) >= 2
    expected = place.root / "expected"
    assert not expected.exists()
    # Worked out by the same public function, so that both orders and numbers of workers must agree with it.
    from gristmill.dataset import read_tasks
    from gristmill.distribution import load_distributions, sample, session_rng

    mine = load_distributions(str(file))["mine"]
    for task in read_tasks(str(place.root / "prompts.jsonl")).tasks:
        assert drawn[task.text] == list(sample(mine, session_rng(7, task.key, 0)).names)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (fail(401, {"error": {"message": "Incorrect API key provided"}}), "401"),
        (fail(404, {"error": {"message": "The model `scripted` does not exist", "code": "model_not_found"}}), "404"),
        (fail(403, {"error": {"message": "forbidden"}}), "403"),
    ],
)
def test_cl_03_a_useless_endpoint_ends_the_run_at_once(place: Place, answer: object, word: str) -> None:
    """CL-03: exit 1 with one sentence, and no prompt is marked as done."""
    place.dataset(*(f"task {n}" for n in range(20)))
    with ScriptedEndpoint([answer]).in_thread() as endpoint:  # type: ignore[list-item]
        begun = time.monotonic()
        printed = place.run(endpoint.url, status=1)
        assert time.monotonic() - begun < 30
        assert endpoint.count < 20
    assert "❌ Fatal error: " in printed and word in printed and "Traceback" not in printed
    assert json.loads((place.directory / "checkpoint.json").read_text())["completed_prompts"] == []
    assert place.statistics()["reconcile"]["kept"] == 0
    with ScriptedEndpoint(FOUR_CALLS).in_thread() as good:
        place.run(good.url, "--resume", "--allow_changes")
    assert len(place.merged()) == 20


def test_an_endpoint_that_is_down_is_said_at_once(place: Place) -> None:
    place.dataset("task")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.monotonic()
    printed = place.run(f"http://127.0.0.1:{port}/v1", status=1)
    assert time.monotonic() - begun < 10
    assert "❌ Fatal error: " in printed and str(port) in printed


def test_re_05_failures_are_owed_and_successes_are_not(place: Place) -> None:
    """RE-05: a prompt that failed runs again on resume, a kept one does not; attempts are counted."""
    broken = fail(400, {"error": {"message": "bad request"}})
    place.dataset("good", "bad")
    with ScriptedEndpoint({"good": [say("a", reasoning="r")], "bad": [broken]}).in_thread() as endpoint:
        printed = place.run(endpoint.url, status=3)
    assert "❌ Prompt 1 failed: " in printed and "(will retry on resume)" in printed
    assert [row["prompt_index"] for row in place.merged()] == [0]
    with ScriptedEndpoint({"bad": [say("b", reasoning="r")]}).in_thread() as endpoint:
        place.run(endpoint.url, "--resume", "--allow_changes")
        assert endpoint.count == 1
    assert [row["prompt_index"] for row in place.merged()] == [0, 1]
    statistics = place.statistics()
    assert statistics["reconcile"]["kept"] == 2 and statistics["reconcile"]["failed"] == 0


def test_re_02_discards_are_not_paid_for_again(place: Place) -> None:
    """RE-02: one model call in total; the discard is recorded, counted, and not in the merged file."""
    place.dataset("a")
    with ScriptedEndpoint([say("plain answer")]).in_thread() as endpoint:
        printed = place.run(endpoint.url)
        assert "🚫 Prompt 0 discarded (no reasoning in any turn)" in printed
        place.run(endpoint.url, "--resume")
        place.run(endpoint.url, "--resume")
        assert endpoint.count == 1
    assert place.merged() == []
    assert place.statistics()["discarded_no_reasoning"] == 1
    assert place.lines()[0]["discarded"] == "no_reasoning"


def test_ex_20_a_made_up_tool_is_counted_and_filtered_at_the_merge(place: Place) -> None:
    """EX-20, MR-27: an error result that names the tools; the row is left out with its reason, and comes back."""
    place.dataset("a")
    script = [
        calls(("terminl", {"command": "echo 1"}), ("terminal", {"command": "echo hi"}), reasoning="r"),
        say("done"),
    ]
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url)
    assert "⚠️  Filtering corrupted entry (batch 0): invalid tool 'terminl'" in printed
    counts = place.statistics()["reconcile"]
    assert (counts["kept"], counts["filtered"]) == (0, 1)
    row = place.lines()[0]
    assert "terminl" not in row["tool_stats"] and row["tool_stats"]["terminal"]["success"] == 1
    assert "terminal" in row["conversations"][3]["value"] and "hi" in row["conversations"][3]["value"]


def test_du_08_a_lone_surrogate_is_replaced_and_spoils_nothing(place: Place) -> None:
    """DU-08, IN-09: rows with half a character are saved with a replacement; a second start does nothing."""
    raw = {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "bad \udc97", "reasoning": "r"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    script = {"b": [fail(200, json.dumps(raw).encode())], "": [say("ok", reasoning="r")]}
    place.dataset("a", "b", "cut emoji \ud83d here")
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url)
        place.run(endpoint.url, "--resume")
        assert endpoint.count == 3
    rows = {row["prompt_index"]: row for row in place.merged()}
    assert rows[1]["conversations"][-1]["value"].endswith("bad \ufffd")
    assert rows[2]["conversations"][1]["value"] == "cut emoji \ufffd here"


@pytest.mark.parametrize(
    "prompt",
    [
        "Explain {{ user }}, {x}, %s, ${HOME} and {% raw %}",
        "What do <|endoftext|>, <|im_end|>, </think>, <tool_call> and <TOOL>X</TOOL> mean?",
        "@/etc/passwd summarise",
        "Q: 16*3 = <<16*3=48>>48\n#### 48\n\nQ: regex ^[a-z]+\\.[a-z]{2,}$ costs $5 `id` $(id)\nA:",
        "Какво можеш да правиш?",
        "    def f():\n",
    ],
)
def test_in_16_17_20_22_prompts_arrive_and_stay_as_they_are(
    place: Place, endpoint: ScriptedEndpoint, prompt: str
) -> None:
    """IN-16, IN-17, IN-20, IN-22: byte for byte the dataset's prompt, in the request and in the trajectory."""
    place.dataset(prompt)
    place.run(endpoint.url, "--num_workers=1")
    assert place.merged()[0]["conversations"][1]["value"] == prompt
    sent = endpoint.requests[0].body["messages"]
    assert sent[-1] == {"role": "user", "content": prompt}


def test_du_05_a_second_process_is_refused(place: Place) -> None:
    """DU-05: exactly one proceeds; the other names the owner and exits at once."""
    place.dataset(*(f"task {n}" for n in range(6)))
    with ScriptedEndpoint(FOUR_CALLS, latency=0.3).in_thread() as endpoint:
        first = place.start(endpoint.url)
        deadline = time.monotonic() + 10
        while not (place.directory / "run.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        printed = place.run(endpoint.url, "--resume", status=1)
        assert str(first.pid) in printed
        first.communicate(timeout=60)
        assert first.returncode == 0


def test_du_09_a_silent_endpoint_is_bounded_by_the_session(place: Place) -> None:
    """DU-09: a request that never answers ends with the session and is owed; other rows are on disk."""
    silent = say("never", fault="silent")
    step = call("terminal", {"command": "true"}, reasoning="r")
    place.dataset("quick", "stuck", "stuck later")
    script = {"quick": [say("a", reasoning="r")], "later": [step, silent], "stuck": [silent]}
    with ScriptedEndpoint(script).in_thread() as endpoint:
        begun = time.monotonic()
        place.run(endpoint.url, "--session_timeout=2", status=3)
        assert time.monotonic() - begun < 15
    # A session without one answer is the endpoint's failure; as a trajectory it would be discarded and count as done.
    outcomes = {row["prompt_index"]: row.get("outcome") for row in place.lines()}
    assert outcomes == {0: "completed", 1: "model_error", 2: "session_timeout"}
    assert sorted(row["prompt_index"] for row in place.merged()) == [0, 2]


def test_samples_and_metadata(place: Place, endpoint: ScriptedEndpoint) -> None:
    place.dataset({"prompt": "a", "id": 7, "topic": {"x": [1, None]}}, "b")
    place.run(endpoint.url, "--samples_per_prompt=3")
    rows = place.merged()
    assert sorted((row["prompt_index"], row["metadata"]["sample"]) for row in rows) == [
        (i, s) for i in (0, 1) for s in (0, 1, 2)
    ]
    first = next(row for row in rows if row["prompt_index"] == 0)
    assert first["metadata"]["row_id"] == "7"
    assert json.loads(first["metadata"]["row"]) == {"topic": {"x": [1, None]}}
    assert place.statistics()["reconcile"]["sessions"] == 6
    assert decode_row(json.dumps(first).encode())["metadata"]["seed"] == 7


@pytest.mark.skipif(not os.access("/opt", os.W_OK), reason="/opt cannot be written here")
def test_a_run_directory_below_a_visible_folder_is_not_visible(place: Place) -> None:
    """The output root may lie below /opt or the like, which sandboxes see; it is hidden all the same."""
    place.dataset("look")
    with tempfile.TemporaryDirectory(dir="/opt") as root:
        script = [call("terminal", {"command": f"ls -A {root} {root}/out"}, reasoning="r"), say("done")]
        with ScriptedEndpoint(script).in_thread() as endpoint:
            place.run(endpoint.url, f"--output_dir={root}/out")
        row = json.loads(Path(root, "out", "r", "trajectories.jsonl").read_text())
    (result,) = parse_tool(row["conversations"][3]["value"])
    assert result["content"]["output"] == f"{root}:\nout\n\n{root}/out:\n"


def test_workers_take_no_module_of_the_current_directory(place: Place, endpoint: ScriptedEndpoint) -> None:
    """Where a user works lies what a user wrote: a file that is named like a module of Python's must not matter."""
    (place.root / "queue.py").write_text("raise RuntimeError('the wrong queue')\n")
    place.dataset("task")
    command = place.command(endpoint.url)
    command[1:1] = ["-P"]  # as the installed `gristmill` command does
    done = subprocess.run(command, env=place.environment, cwd=place.root, timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert len(place.merged()) == 1


def test_rows_with_an_image_are_told_of_where_the_sandbox_has_none(place: Place, endpoint: ScriptedEndpoint) -> None:
    """Each fails with its reason and is owed to another sandbox; where every row is such a one, nothing starts."""
    place.dataset("plain", {"prompt": "pictured", "image": "debian"})
    printed = place.run(endpoint.url, status=3)
    assert "--sandbox=local has none; they will fail: 1." in printed
    assert "❌ Prompt 1 failed: The local sandbox has no images." in printed
    assert {line["prompt_index"]: line["outcome"] for line in place.lines()} == {0: "completed", 1: "sandbox_error"}
    place.dataset({"prompt": "pictured", "image": "debian"})
    printed = place.run(endpoint.url, "--run_name=other", status=1)
    assert "Every prompt names an image" in printed and not (place.root / "data" / "other").exists()
