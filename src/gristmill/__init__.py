"""Agent sessions for every prompt of a file, each in its own sandbox, as trajectories.

The names below are the public ones, imported when they are asked for, so that `import gristmill` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gristmill.build import make_runner
    from gristmill.config import ModelConfig, RunConfig, SandboxConfig
    from gristmill.dataset import read_tasks
    from gristmill.distribution import load_distributions
    from gristmill.distribution_rules import Distribution
    from gristmill.errors import (
        GristmillError,
        ModelError,
        SandboxError,
        SessionError,
        SetupError,
        StoreError,
        TaskError,
        UsageError,
    )
    from gristmill.events import Event, RunReport
    from gristmill.model.base import Model, Reply, Request
    from gristmill.quality.base import Filter, FilterContext
    from gristmill.run.reader import RunReader
    from gristmill.run.runner import Runner
    from gristmill.sandbox.base import ExecResult, Job, Sandbox, SandboxProvider, SandboxSpec
    from gristmill.task import Dataset, Task
    from gristmill.tools.base import Access, Tool, ToolContext, Toolset
    from gristmill.tools.functions import tool
    from gristmill.types import Limits, Message, Outcome, ToolCall, ToolResult, ToolSchema, Usage

_PLACES = {
    "Access": "tools.base",
    "Dataset": "task",
    "Distribution": "distribution_rules",
    "Event": "events",
    "ExecResult": "sandbox.base",
    "Filter": "quality.base",
    "FilterContext": "quality.base",
    "GristmillError": "errors",
    "Job": "sandbox.base",
    "Limits": "types",
    "Message": "types",
    "Model": "model.base",
    "ModelConfig": "config",
    "ModelError": "errors",
    "Outcome": "types",
    "Reply": "model.base",
    "Request": "model.base",
    "RunConfig": "config",
    "RunReader": "run.reader",
    "RunReport": "events",
    "Runner": "run.runner",
    "Sandbox": "sandbox.base",
    "SandboxConfig": "config",
    "SandboxError": "errors",
    "SandboxProvider": "sandbox.base",
    "SandboxSpec": "sandbox.base",
    "SessionError": "errors",
    "SetupError": "errors",
    "StoreError": "errors",
    "Task": "task",
    "TaskError": "errors",
    "Tool": "tools.base",
    "ToolCall": "types",
    "ToolContext": "tools.base",
    "ToolResult": "types",
    "ToolSchema": "types",
    "Toolset": "tools.base",
    "Usage": "types",
    "UsageError": "errors",
    "load_distributions": "distribution",
    "make_runner": "build",
    "read_tasks": "dataset",
    "tool": "tools.functions",
}

__all__ = [
    "Access",
    "Dataset",
    "Distribution",
    "Event",
    "ExecResult",
    "Filter",
    "FilterContext",
    "GristmillError",
    "Job",
    "Limits",
    "Message",
    "Model",
    "ModelConfig",
    "ModelError",
    "Outcome",
    "Reply",
    "Request",
    "RunConfig",
    "RunReader",
    "RunReport",
    "Runner",
    "Sandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxProvider",
    "SandboxSpec",
    "SessionError",
    "SetupError",
    "StoreError",
    "Task",
    "TaskError",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "ToolSchema",
    "Toolset",
    "Usage",
    "UsageError",
    "__version__",
    "load_distributions",
    "make_runner",
    "read_tasks",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'gristmill' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gristmill.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
