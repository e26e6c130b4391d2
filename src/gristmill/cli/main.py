"""The command line: which commands there are, and the one edge where errors become a sentence and an exit status.

Nothing heavy is imported here: `--help` is read more often than a run is started.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence

import click

from gristmill import __version__
from gristmill.cli.console import Lines
from gristmill.cli.parsing import CONTEXT, RunCommand, lazily, usage_error
from gristmill.errors import GristmillError, NotReady, UsageError

INTERRUPTED = 130

_RUN = click.Argument(["run"], metavar="RUN")
_OUTPUT_DIR = click.Option(
    ["--output_dir"], default="data", show_default=True, help="Output root, where RUN is a run's name."
)
_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document.")


def _command(name: str, help: str, *params: click.Parameter) -> click.Command:
    place = f"gristmill.cli.{name}:{name}"
    return click.Command(name, callback=lazily(place), params=list(params), help=help, context_settings=CONTEXT)


def _print_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"gristmill {__version__}")
        context.exit()


def _without_command() -> int:
    """Runs before every command; where there is none, the help is the answer, and the usage was wrong."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return UsageError.exit_status


GROUP = click.Group(
    "gristmill",
    help="Runs a tool-using agent session for every prompt of a JSONL file, each in its own sandbox, and leaves "
    "trajectories for training and evaluation.",
    callback=_without_command,
    invoke_without_command=True,
    context_settings=CONTEXT,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_print_version,
            help="Print the version.",
        )
    ],
    commands=[
        RunCommand("run", "gristmill.cli.run:run", "Run an agent session for every prompt of a file."),
        _command("status", "What a run directory holds, and what is still owed.", _RUN, _OUTPUT_DIR, _JSON),
        _command(
            "merge",
            "Merge a run's batch files again, with other filters if you like.",
            _RUN,
            _OUTPUT_DIR,
            click.Option(["--filters"], help="Filters with commas between them; none switches all off."),
            _JSON,
        ),
        _command(
            "distributions",
            "Every toolset distribution, or one with the frequencies that drawing from it gives.",
            click.Argument(["name"], required=False),
            click.Option(["--draws"], default="10000", show_default=True, help="How often to draw from NAME."),
            click.Option(["--seed"], default="0", show_default=True, help="Seed of the draws."),
            click.Option(["--distributions_file"], help="TOML or JSON file with distributions of your own."),
            _JSON,
        ),
        _command(
            "doctor",
            "What this machine can do, and how to mend what it cannot.",
            _OUTPUT_DIR,
            click.Option(["--mcp_config"], help="JSON file of MCP servers, to be asked too."),
            _JSON,
        ),
        _command("clean", "Remove what killed runs left: only what gristmill has labelled.", _JSON),
    ],
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status. `argv` None is that of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console that is not UTF-8 shows less, but never stops us
    errors = Lines(sys.stderr)
    wordy = any(a.replace("-", "").lower() in ("verbose", "verbose=true") for a in arguments)
    try:
        # A command returns its exit status; None is success.
        return GROUP.main(arguments, prog_name="gristmill", standalone_mode=False) or 0
    except click.ClickException as error:
        return _report(errors, usage_error(error), wordy=False)
    except GristmillError as error:
        return _report(errors, error, wordy and not isinstance(error, UsageError))
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the edge: whatever else goes wrong is a defect, told in one sentence
        text = f"{type(error).__name__}: {error}. This is a defect of gristmill."
        return _report(errors, GristmillError(text, "" if wordy else "--verbose shows where it happened."), wordy)


def _report(errors: Lines, error: GristmillError, wordy: bool) -> int:
    if wordy:
        errors.write(traceback.format_exc().rstrip())
    lines = [str(error)]
    if isinstance(error, NotReady):
        lines = [error.message, *(f"- {problem}" for problem in error.problems), *filter(None, (error.mend,))]
    errors.write("\n   ".join(line.replace("\n", " ") for line in (f"❌ Fatal error: {lines[0]}", *lines[1:])))
    return error.exit_status
