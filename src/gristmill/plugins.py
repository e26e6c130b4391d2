"""The one door for parts that go by a name: built-in ones, entry points of installed packages, and `module:attr`.

Entry-point groups: `gristmill.sandboxes`, `gristmill.toolsets`, `gristmill.filters`, `gristmill.exporters`,
`gristmill.models`. A part is imported when it is asked for, so that a heavy library costs only those who use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from gristmill.errors import SetupError, UsageError
from gristmill.tools.builtin import BUILTIN_TOOLSETS

SANDBOXES: Mapping[str, str] = {
    "local": "gristmill.sandbox.bubblewrap:BubblewrapSandboxes",
    "host": "gristmill.sandbox.host:HostSandboxes",
    "docker": "gristmill.sandbox.docker:DockerSandboxes",
    "singularity": "gristmill.sandbox.singularity:SingularitySandboxes",
    "ssh": "gristmill.sandbox.ssh:SshSandboxes",
    "modal": "gristmill.sandbox.modal:ModalSandboxes",
    "daytona": "gristmill.sandbox.daytona:DaytonaSandboxes",
}

_TABLES: Mapping[str, Mapping[str, str]] = {"sandboxes": SANDBOXES, "toolsets": BUILTIN_TOOLSETS}

# Which extra of this package brings a library that may be missing.
_EXTRAS: Mapping[str, str] = {
    "playwright": "browser",
    "mcp": "mcp",
    "ddgs": "web",
    "trafilatura": "web",
    "lxml_html_clean": "web",
    "pypdf": "web",
    "PIL": "vision",
    "xllamacpp": "local",
    "aiodocker": "docker",
    "asyncssh": "ssh",
    "modal": "modal",
    "daytona": "daytona",
    "ray": "ray",
}


def names(kind: str) -> list[str]:
    """All names of a kind (`sandboxes`, `toolsets`, …), built-in ones first."""
    own = list(_TABLES.get(kind, {}))
    return own + sorted(e.name for e in entry_points(group=f"gristmill.{kind}") if e.name not in own)


def find(kind: str, name: str) -> Any:
    """The part of this kind that answers to `name`.

    Raises:
        UsageError: no such name; the known ones are listed.
        SetupError: it needs a library that is not installed; the extra that brings it is named.
    """
    target = _TABLES.get(kind, {}).get(name)
    if target is None:
        for entry in entry_points(group=f"gristmill.{kind}"):
            if entry.name == name:
                target = entry.value
    if target is None and ":" in name:
        target = name
    if target is None:
        what = {"sandboxes": "sandbox", "toolsets": "toolset"}.get(kind, kind)
        raise UsageError(f"Unknown {what}: {name}.", f"Known are {', '.join(names(kind))}, or give module:attr.")
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        mend = (
            f"Install it with: pip install 'gristmill[{extra}]'" if extra else f"Install the package of {error.name}."
        )
        raise SetupError(f"{name} needs the library {error.name}, which is not installed.", mend) from error
    except AttributeError as error:
        raise UsageError(f"{target} does not exist: {error}.") from error
    return found
