"""Whatever a crash, a full disk or a careless hand leaves behind: nothing finished is lost, nothing is there twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import StoreError
from gristmill.run.journal import Entry, Journal, Landed, append_group, mend_tail
from gristmill.run.layout import Layout
from gristmill.trajectory import decode_row
from support.rundir import append_all, discarded, failed, kept, lines, merged, open_store, statistics, tasks, texts

PROMPTS = ["a", "b", "a", "Ünïcode 😀", "e", "f"]
TASKS = tasks(PROMPTS)
SESSIONS = [kept(TASKS[0]), kept(TASKS[1]), kept(TASKS[2], 1), kept(TASKS[3], 1), discarded(TASKS[4], 2)]
FILES = {n: b"".join(s.row for s in SESSIONS if s.batch == n) for n in range(3)}


def readable(data: bytes) -> list[bytes]:
    """The outcome lines of a damaged file, found without the code under test."""
    whole, _, tail = data.rpartition(b"\n")
    found = []
    for line in [*whole.split(b"\n"), tail.rstrip(b"\0")]:
        try:
            if isinstance(data := json.loads(line), dict) and "prompt_index" in data:
                found.append(line)
        except ValueError:
            continue
    return found


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(0, 2),
    cut=st.floats(0, 1),
    garbage=st.binary(max_size=12)
    | st.sampled_from([b"\0" * 40, b'{"prompt_index":', b"\xff\xfe\n", b"{}\n", b"\n\n", b"\r\n"]),
    index=st.booleans(),
)
def test_any_cut_and_any_tail_lead_to_a_whole_run(batch: int, cut: float, garbage: bytes, index: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        layout = Layout(root / "r")
        layout.root.mkdir()
        for number, data in FILES.items():
            layout.batch(number).write_bytes(data)
        if index:  # made before the crash
            store = open_store(root, PROMPTS, resume=True)
            store.close()
        data = FILES[batch][: round(cut * len(FILES[batch]))] + garbage
        layout.batch(batch).write_bytes(data)
        damaged = {number: layout.batch(number).read_bytes() for number in FILES}

        store = open_store(root, PROMPTS, resume=True)
        found = store.owed(TASKS, 1)
        recorded = Counter(
            json.loads(line).get("task_key") or json.loads(line)["metadata"]["task_key"]
            for content in damaged.values()
            for line in readable(content)
        )
        assert {item.task.key for item in found.owed} == {task.key for task in TASKS} - set(recorded)
        for number, content in damaged.items():
            now = layout.batch(number).read_bytes()
            # As it was, but for a torn tail that was cut, or a newline that was added.
            assert content.startswith(now) or now.removesuffix(b"\n") == content.rstrip(b"\0")
            assert now.endswith(b"\n") or not now
        asyncio.run(append_all(store, [kept(item.task, store.next_batch) for item in found.owed]))
        report = store.finalize()
        store.close()
        assert report.rows + report.discarded == len(PROMPTS) and report.failed == 0
        done = texts(merged(root)) + [
            line["prompt"] for n in FILES for line in outcomes(layout, n) if "discarded" in line
        ]
        assert Counter(done) == Counter(PROMPTS)
        assert statistics(root)["reconcile"]["pending"] == 0


def outcomes(layout: Layout, batch: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in readable(layout.batch(batch).read_bytes())]


def copy_what_is_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # a temporary file that was renamed meanwhile
        shutil.copy2(source, target)


async def test_a_copy_taken_at_any_moment_continues(tmp_path: Path) -> None:
    """The directory as it stands at random moments of a run, copied file by file while rows go on being written."""
    everything = tasks([f"task {n}" for n in range(60)])
    prompts = [task.text for task in everything]
    store = open_store(tmp_path, prompts)
    store.owed(everything, 1)
    acknowledged: set[int] = set()
    copies: list[tuple[Path, set[int]]] = []
    choose = random.Random(5)

    async def session(number: int) -> None:
        await asyncio.sleep(choose.random() * 0.4)
        task = everything[number]
        made = discarded(task, number // 7) if number % 9 == 0 else kept(task, number // 7)
        await store.append(made)
        acknowledged.add(number)

    async def copy() -> None:
        for number in range(6):
            await asyncio.sleep(choose.random() * 0.09)
            before = set(acknowledged)
            target = tmp_path / f"copy{number}" / "r"
            await asyncio.to_thread(shutil.copytree, store.layout.root, target, copy_function=copy_what_is_there)
            copies.append((target.parent, before))

    await asyncio.gather(copy(), *(session(number) for number in range(60)))
    store.close()
    assert len(copies) == 6 and any(0 < len(before) < 60 for _, before in copies)
    for root, before in copies:
        again = open_store(root, prompts, resume=True)
        found = again.owed(everything, 1)
        owed = {item.task.index for item in found.owed}
        assert not owed & before
        await append_all(again, [kept(item.task, again.next_batch) for item in found.owed])
        report = again.finalize()
        again.close()
        assert report.rows + report.discarded == 60
        checkpoint = json.loads(again.layout.checkpoint.read_bytes())
        assert checkpoint["completed_prompts"] == list(range(60))


WRITER = """
import asyncio, sys
from pathlib import Path
from support.rundir import kept, open_store, tasks
root, count = Path(sys.argv[1]), int(sys.argv[2])
prompts = [f"task {n}" for n in range(count)]
async def main():
    store = open_store(root, prompts, resume=True)
    found = store.owed(tasks(prompts), 1)
    print("owed", *(item.task.index for item in found.owed), flush=True)
    first = store.next_batch
    async def one(place, item):
        await asyncio.sleep(place * 0.002)
        await store.append(kept(item.task, first + place // 5, text="x" * 3000))
        print("done", item.task.index, flush=True)
    await asyncio.gather(*(one(place, item) for place, item in enumerate(found.owed)))
    store.finalize()
    print("end", flush=True)
asyncio.run(main())
"""


def start_writer(root: Path, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )


def test_killed_at_random_moments_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    count = 120
    choose = random.Random(3)
    acknowledged: set[int] = set()
    ended = killed = 0
    for _ in range(12):
        writer = start_writer(tmp_path, count)
        assert writer.stdout is not None
        first = writer.stdout.readline().split()
        assert not {int(n) for n in first[1:]} & acknowledged, "an acknowledged row is owed again"
        if killed < 6:
            time.sleep(choose.random() * 0.12)
            writer.send_signal(signal.SIGKILL)
            killed += 1
        rest = writer.communicate(timeout=60)[0].splitlines()
        acknowledged |= {int(line.split()[1]) for line in rest if line.startswith("done")}
        if "end" in rest:
            ended += 1
            break
    assert ended == 1 and killed == 6
    rows = merged(tmp_path)
    assert Counter(texts(rows)) == Counter(f"task {n}" for n in range(count))
    assert not [path for path in (tmp_path / "r").iterdir() if path.suffix == ".tmp"]
    assert json.loads((tmp_path / "r" / "checkpoint.json").read_bytes())["completed_prompts"] == list(range(count))


FULL = """
import asyncio, resource, sys
from pathlib import Path
from gristmill.errors import StoreError
from support.rundir import kept, open_store, tasks
prompts = [f"task {n}" for n in range(40)]
async def main():
    store = open_store(Path(sys.argv[1]), prompts)
    store.owed(tasks(prompts), 1)
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    refused = 0
    for task in tasks(prompts):
        try:
            await store.append(kept(task, 0, text="x" * 5000))
        except StoreError as error:
            if not refused:
                print("refused", task.index, error, flush=True)
            refused += 1
        else:
            print("done", task.index, flush=True)
            assert not refused, "written after a refusal"
    print("all refused", refused, flush=True)
asyncio.run(main())
"""


def run_full(root: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> list[str]:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", FULL, str(root), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=60,
        check=False,
    )
    return (done.stdout + done.stderr).splitlines()


def check_after_refusal(root: Path, said: list[str]) -> None:
    done = [int(line.split()[1]) for line in said if line.startswith("done")]
    (refusal,) = [line for line in said if line.startswith("refused")]
    assert 0 < len(done) < 40 and f"all refused {40 - len(done)}" in said
    assert "Cannot write" in refusal and "disk mounted at" in refusal and "--resume" in refusal
    data = (root / "r" / "batch_0.jsonl").read_bytes()
    assert data.endswith(b"\n") and len(data.splitlines()) == len(done)
    for line in data.splitlines():
        decode_row(line)


async def finish(root: Path) -> None:
    prompts = [f"task {n}" for n in range(40)]
    store = open_store(root, prompts, resume=True)
    found = store.owed(tasks(prompts), 1)
    await append_all(store, [kept(item.task, store.next_batch) for item in found.owed])
    assert store.finalize().rows == 40
    store.close()


async def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path: Path) -> None:
    """A file size limit of the kernel: the write that crosses it is cut short, then refused."""
    said = run_full(tmp_path, "50000")
    check_after_refusal(tmp_path, said)
    await finish(tmp_path)


async def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    """A real disk of 300 kB, in a mount namespace of the test's own."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no ordinary process mount a tmpfs")
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=300k tmpfs {disk}; "$@"; cp -r {disk} {saved}'
    said = run_full(disk, prefix=("unshare", "-Urm", "sh", "-c", script, "sh"))
    check_after_refusal(saved, said)
    assert f"disk mounted at {disk}" in "".join(said)
    await finish(saved)


async def test_an_index_that_fails_does_not_stop_the_run(tmp_path: Path) -> None:
    store = open_store(tmp_path, PROMPTS)
    store.owed(TASKS, 1)
    await append_all(store, SESSIONS[:2])
    store._index._database.execute("DROP TABLE lines")
    await append_all(store, SESSIONS[2:])
    assert store.finalize().rows == 4
    store.close()


def test_an_error_of_the_disk_reaches_everyone_who_waits(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.batch(0).mkdir()  # cannot be opened for writing

    async def main() -> list[BaseException | None]:
        journal = Journal(layout, lambda landed: None)
        try:
            return await asyncio.gather(*(journal.append(0, b"{}\n", b"") for _ in range(5)), return_exceptions=True)
        finally:
            journal.close()

    assert [type(error) for error in asyncio.run(main())] == [StoreError] * 5


def test_a_failure_that_no_one_foresaw_hangs_no_one(tmp_path: Path) -> None:
    def landed(group: object) -> None:
        raise KeyError("a bug")

    async def main() -> BaseException | None:
        journal = Journal(Layout(tmp_path), landed)
        try:
            await asyncio.wait_for(journal.append(0, b"{}\n", b""), 5)
        except StoreError as error:
            return error
        finally:
            journal.close()
        return None

    assert isinstance(asyncio.run(main()), StoreError)
    assert lines(Layout(tmp_path).batch(0)) == [{}]


async def test_a_cancelled_caller_loses_no_row(tmp_path: Path) -> None:
    got: list[Landed] = []
    journal = Journal(Layout(tmp_path), got.extend)
    waiting = asyncio.create_task(journal.append(0, b'{"a":1}\n', b""))
    await asyncio.sleep(0)
    waiting.cancel()
    await journal.append(0, b'{"a":2}\n', b"")
    journal.close()
    assert lines(Layout(tmp_path).batch(0)) == [{"a": 1}, {"a": 2}] and len(got) == 2


async def test_many_sessions_share_a_flush(tmp_path: Path) -> None:
    groups: list[int] = []
    journal = Journal(Layout(tmp_path), lambda landed: groups.append(len(landed)))
    await asyncio.gather(*(journal.append(n % 3, b"{}\n", b"r") for n in range(300)))
    journal.close()
    assert sum(groups) == 300 and len(groups) <= 3
    assert sum(len(lines(Layout(tmp_path).batch(n))) for n in range(3)) == 300
    assert b"".join(Layout(tmp_path).sessions(n).read_bytes() for n in range(3)) == b"r" * 300


def test_a_record_without_a_row_is_harmless_and_a_row_never_lacks_its_record(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.batch(0).mkdir()
    with pytest.raises(StoreError):
        append_group(layout, [Entry(0, b"{}\n", b"record")])
    assert layout.sessions(0).read_bytes() == b"record"
    layout.sessions(1).mkdir()
    with pytest.raises(StoreError):
        append_group(layout, [Entry(1, b"{}\n", b"record")])
    assert not layout.batch(1).exists()


@pytest.mark.parametrize("size", [10, 65536, 200_000])
def test_a_long_torn_tail_is_found_and_kept(tmp_path: Path, size: int) -> None:
    path = Layout(tmp_path).batch(3)
    path.write_bytes(b'{"a":1}\n' + b'{"b":"' + b"x" * size)
    said = mend_tail(path)
    assert path.read_bytes() == b'{"a":1}\n'
    (torn,) = tmp_path.glob("batch_3.jsonl.torn-*")
    assert torn.read_bytes() == b'{"b":"' + b"x" * size and torn.name in said
    assert mend_tail(path) == ""


def test_failures_are_told_from_kept_rows_in_the_file(tmp_path: Path) -> None:
    (line,) = [json.loads(failed(TASKS[0]).row)]
    assert line["failed"] is True and "conversations" not in line


async def test_checkpoints_cost_linear_time(tmp_path: Path) -> None:
    """However long the run, all checkpoints together write a bounded multiple of the last one."""
    from gristmill.run.checkpoint import Checkpoint

    factors = []
    for count in (1_000, 10_000, 100_000):
        checkpoint = Checkpoint("r", ((n, 1) for n in range(count)), [])
        written = 0
        for number in range(count):
            checkpoint.note(number, number // 100, no_reasoning=False)
            if checkpoint.due:
                written += len(checkpoint.encode())
        factors.append(written / len(checkpoint.encode()))
    assert max(factors) < 13, factors
