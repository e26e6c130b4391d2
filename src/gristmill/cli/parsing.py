"""How click is made to fit: both spellings, values by kind, help in groups, errors in a sentence with near matches."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import click

from gristmill.cli.flags import BY_NAME, FLAGS, Flag, Kind
from gristmill.errors import UsageError

CONTEXT: dict[str, Any] = {
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "help_option_names": ["--help", "-h"],
    "max_content_width": 120,
}


def lazily(place: str) -> Callable[..., Any]:
    """The function `module:name`, imported when it is called: help must not wait for what only a run needs."""

    def call(**values: Any) -> Any:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(module), name)(**values)

    return call


class RunCommand(click.Command):
    """The command whose options are the table of flags; its callback gets `given`, the values that were typed."""

    def __init__(self, name: str, place: str, help: str) -> None:
        super().__init__(
            name,
            callback=lazily(place),
            params=[_option(flag) for flag in FLAGS],
            help=help,
            context_settings=CONTEXT,
            add_help_option=True,
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Read what was typed, in the order of the table, and call."""
        given = {}
        for name, text in ctx.params.items():
            if text is not None:
                if text.startswith("--") and text[2:].replace("-", "_") in BY_NAME:
                    raise UsageError(f"--{name} needs a value; {text} follows it.")
                given[name] = BY_NAME[name].read(text)
        assert self.callback is not None
        return self.callback(given=given)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section a group, in the order of the table."""
        for group, flags in groupby(FLAGS, lambda flag: flag.group):
            with formatter.section(group):
                formatter.write_dl([(_spelling(flag), _explain(flag)) for flag in flags], col_max=34)


def _option(flag: Flag) -> click.Option:
    # A switch may stand alone, or take true or false as the reference's command line did.
    alone: dict[str, Any] = {"flag_value": "true"} if flag.kind is Kind.SWITCH else {}
    return click.Option([f"--{flag.name}"], type=str, default=None, is_flag=False, **alone)


def _spelling(flag: Flag) -> str:
    return f"--{flag.name} {flag.kind.value}".rstrip()


def _explain(flag: Flag) -> str:
    note = "required" if flag.required else flag.shown_default and f"default: {flag.shown_default}"
    return f"{flag.help}  [{note}]" if note else flag.help


def usage_error(error: click.ClickException) -> UsageError:
    """click's complaint in our words, with near matches for a flag or a command that does not exist."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "gristmill"
    mend = f"`{path} --help` explains every flag."
    if isinstance(error, click.NoSuchOption):
        names = [n for p in context.command.params for n in p.opts] if context else []
        return UsageError(f"Unknown flag: {error.option_name}.", _did_you_mean(error.option_name, names) or mend)
    message = error.format_message().strip()
    return UsageError(message if message.endswith((".", "?")) else f"{message}.", mend)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), [k.replace("-", "_") for k in known], n=3)
    return f"Did you mean {' or '.join('--' + n.lstrip('_') for n in near)}?" if near else ""
