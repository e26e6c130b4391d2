"""`terminal` and `process`: commands of the session's shell, and those that it left running in the background."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gristmill.sandbox.base import OUTPUT_HEAD, Job
from gristmill.tools.base import TERMINAL_LIMIT, Access, Tool, ToolContext, Toolset
from gristmill.tools.text import bounded, decode_output, last_part, shorten
from gristmill.types import ToolSchema

GLANCE_LIMIT = 2_000  # characters of output that `poll` shows
JOB_LIMIT = 64  # background processes remembered per session; each may hold 0.5 MB of output
INPUT_SECONDS = 10.0  # how long a process may take to accept input
END_SECONDS = 5.0  # how long a killed process may take to be gone

BINARY_NOTE = (
    "The output is not plain UTF-8 text: other bytes are shown as \ufffd and NUL as \\x00. "
    "Pipe it through `xxd` or `base64` to see it exactly."
)


async def run_terminal(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one command, in the foreground or the background."""
    command = arguments["command"]
    workdir = arguments.get("workdir") or ""
    if "\0" in command or "\0" in workdir:
        return _failed("A NUL character cannot be part of a command; write \\0 for printf, or use a file.")
    if arguments.get("background"):
        return await _start(context, command, workdir)
    timeout = arguments.get("timeout", context.terminal_timeout)
    result = await context.sandbox.exec(command, timeout=timeout, workdir=workdir)
    output, binary = decode_output(result.output, result.dropped, OUTPUT_HEAD, TERMINAL_LIMIT)
    shown: dict[str, Any] = {"output": output, "exit_code": result.exit_code, "error": None}
    if result.timed_out:
        shown["error"] = (
            f"The command timed out after {timeout:g} s and was killed with all its children. "
            "Give a longer timeout, or start it with background=true."
        )
    notes = [note for note in (result.note, BINARY_NOTE if binary else "") if note]
    if notes:
        shown["note"] = " ".join(notes)
    return shown


def _failed(error: str, exit_code: int = -1) -> dict[str, Any]:
    return {"output": "", "exit_code": exit_code, "error": error}


# ---- background processes


def _jobs(context: ToolContext) -> dict[str, Job]:
    jobs: dict[str, Job] = context.state.setdefault("terminal", {})
    return jobs


async def _start(context: ToolContext, command: str, workdir: str) -> dict[str, Any]:
    jobs = _jobs(context)
    if len(jobs) >= JOB_LIMIT:
        ended = next((name for name, job in jobs.items() if job.exit_code is not None), None)
        if ended is None:
            return _failed(f"{JOB_LIMIT} background processes are running already: end some with the process tool.")
        del jobs[ended]
    job = await context.sandbox.spawn(command, workdir=workdir)
    jobs[job.id] = job
    return {
        "output": "Started in the background; the process tool shows its output and ends it.",
        "session_id": job.id,
        "pid": job.pid,
        "exit_code": 0,
        "error": None,
    }


async def run_process(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Look at, wait for, feed or end a background process."""
    action = arguments["action"]
    jobs = _jobs(context)
    if action == "list":
        return {"processes": [_described(job) for job in jobs.values()]}
    name = arguments.get("session_id", "")
    job = jobs.get(name)
    if job is None:
        known = f"Known are {', '.join(jobs)}." if jobs else "No background process was started in this session."
        what = f"There is no process {bounded(name, 60)!r}." if name else f"{action} needs a session_id."
        return {"error": f"{what} {known}"}
    if action in ("write", "submit", "close"):
        return await _feed(job, action, arguments.get("data", ""))
    if action == "kill":
        ended = job.exit_code is not None
        await job.kill()
        await job.wait(END_SECONDS)
        return _shown(job, GLANCE_LIMIT, note="It had already ended." if ended else "")
    if action == "wait":
        timeout = arguments.get("timeout", context.terminal_timeout)
        ended = await job.wait(timeout)
        return _shown(job, TERMINAL_LIMIT, note="" if ended else f"It is still running after {timeout:g} s.")
    if action == "log":
        return _log(job, arguments.get("offset"), arguments.get("limit", 200))
    return _shown(job, GLANCE_LIMIT)


def _described(job: Job) -> dict[str, Any]:
    code = job.exit_code
    return {
        "session_id": job.id,
        "command": bounded(job.command, 200),
        "pid": job.pid,
        "status": "running" if code is None else "exited",
        "exit_code": code,
        "uptime_seconds": round(max(0.0, time.time() - job.started), 1),
    }


def _output(job: Job, limit: int) -> tuple[str, bool]:
    data, dropped = job.output()
    return decode_output(data, dropped, OUTPUT_HEAD, limit)


def _shown(job: Job, limit: int, note: str = "") -> dict[str, Any]:
    output, binary = _output(job, TERMINAL_LIMIT)
    output = last_part(output, limit)
    shown = {**_described(job), "output": output}
    notes = [text for text in (note, BINARY_NOTE if binary else "") if text]
    return {**shown, "note": " ".join(notes)} if notes else shown


def _log(job: Job, offset: int | None, limit: int) -> dict[str, Any]:
    """A page of lines: from line `offset`, or the last ones."""
    output, _ = _output(job, OUTPUT_HEAD * 4)  # all that is kept
    lines = output.splitlines()
    first = max(0, len(lines) - limit) if offset is None else max(0, offset - 1)
    page = lines[first : first + limit]
    return {
        **_described(job),
        "output": shorten("\n".join(page), TERMINAL_LIMIT),
        "total_lines": len(lines),
        "first_line": first + 1 if page else 0,
        "truncated": len(page) < len(lines),
    }


async def _feed(job: Job, action: str, data: str) -> dict[str, Any]:
    try:
        async with asyncio.timeout(INPUT_SECONDS):
            if action == "close":
                await job.close_stdin()
            else:
                await job.write((data + "\n" if action == "submit" else data).encode())
    except BrokenPipeError:
        return {**_shown(job, GLANCE_LIMIT), "error": "It takes no more input: its standard input is closed."}
    except TimeoutError:
        return {**_shown(job, GLANCE_LIMIT), "error": f"It did not read its input within {INPUT_SECONDS:g} s."}
    return _shown(job, GLANCE_LIMIT)


# ---- the toolset


def _shell(arguments: dict[str, Any]) -> Access:
    return Access(("sandbox",), writes=True)


def _process_access(arguments: dict[str, Any]) -> Access:
    looks = arguments["action"] in ("list", "poll", "log", "wait")
    name = arguments.get("session_id", "")
    return Access(("sandbox", "process", name) if name else ("sandbox", "process"), writes=not looks)


TERMINAL = Toolset(
    name="terminal",
    tools=(
        Tool(
            schema=ToolSchema(
                name="terminal",
                description=(
                    "Run a bash command. The working directory, exported variables and files stay for the next call. "
                    "Standard input is empty, so use flags that ask no questions. For servers and other long work set "
                    "background=true and look after it with the process tool."
                ),
                parameters={
                    "type": "object",
                    "properties": {
                        "command": {"type": "string", "description": "Shell text; may have several lines."},
                        "background": {
                            "type": "boolean",
                            "default": False,
                            "description": "Return at once and leave the command running.",
                        },
                        "timeout": {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": 600,
                            "default": 180,
                            "description": "Seconds after which a foreground command is killed.",
                        },
                        "workdir": {
                            "type": "string",
                            "description": "Directory for this command only; default is the current one.",
                        },
                    },
                    "required": ["command"],
                    "additionalProperties": False,
                },
            ),
            toolset="terminal",
            run=run_terminal,
            access=_shell,
        ),
        Tool(
            schema=ToolSchema(
                name="process",
                description=(
                    "Look after background processes: list them, poll (status and latest output), log (a page of its "
                    "output), wait for the end, kill, write to its input, submit (write and Enter), close its input."
                ),
                parameters={
                    "type": "object",
                    "properties": {
                        "action": {
                            "type": "string",
                            "enum": ["list", "poll", "log", "wait", "kill", "write", "submit", "close"],
                        },
                        "session_id": {
                            "type": "string",
                            "description": "As terminal returned it; needed for all but list.",
                        },
                        "data": {"type": "string", "description": "Text for write and submit."},
                        "timeout": {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": 600,
                            "description": "Seconds that wait waits at most.",
                        },
                        "offset": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "First line that log shows; default is the last page.",
                        },
                        "limit": {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": 2000,
                            "default": 200,
                            "description": "Lines that log shows.",
                        },
                    },
                    "required": ["action"],
                    "additionalProperties": False,
                },
            ),
            toolset="terminal",
            run=run_process,
            access=_process_access,
        ),
    ),
)
