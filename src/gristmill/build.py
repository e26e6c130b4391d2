"""The composition root: the one place that knows which part answers to which name and puts a run together.

```
RunConfig → check() → Plan → make_runner() → Runner            in the runner's process
frames.Begin → make_kit() → Kit                                in each worker process
```
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gristmill import events, plugins
from gristmill.config import ModelConfig, RunConfig, find_api_key
from gristmill.dataset import read_tasks
from gristmill.distribution import find_distribution, load_distributions, sample, session_rng
from gristmill.distribution_rules import Distribution
from gristmill.errors import NotReady, SetupError
from gristmill.model import select
from gristmill.model.embedded import EmbeddedServer
from gristmill.model.embedded import problem as embedded_problem
from gristmill.model.pricing import Prices
from gristmill.offer import McpServers, Offer, ask_mcp_servers, find_toolsets, known_tools, load_toolset, own_toolsets
from gristmill.quality.filters import parse_filters
from gristmill.run import frames
from gristmill.run.budget import Budget
from gristmill.run.executor import Executor, LocalExecutor, LocalGate
from gristmill.run.processes import ProcessExecutor
from gristmill.run.runner import Batches, Runner
from gristmill.run.serve import serve
from gristmill.run.store import Owed, RunStore
from gristmill.run.worker import Kit
from gristmill.sandbox.base import HIDDEN, SandboxProvider
from gristmill.sandbox.limits import check_limits
from gristmill.sandbox.pool import PooledSandboxes, pooled
from gristmill.session.record import Gate, SessionSettings
from gristmill.session.spec import SessionSpec
from gristmill.session.summary import RowShape, lost_session
from gristmill.task import Dataset
from gristmill.tools.base import Toolset
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP
from gristmill.types import Message, Usage

# What a warning says at every start.
NOT_ISOLATED: Mapping[str, str] = {
    "host": "commands of the model run on this machine as you.",
    "ssh": "commands of the model run on the remote host as the user who logs in there, and see what that user sees.",
}


@dataclass(frozen=True)
class Plan:
    """A run that was checked and can start.

    `offered`, `missing` and `always` are those of an `Offer`. `config` has the endpoint's key. `warnings` are for the
    user.
    """

    config: RunConfig
    dataset: Dataset
    distribution: Distribution
    offered: Mapping[str, Toolset]
    missing: Mapping[str, str] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    mcp: McpServers | None = None
    warnings: tuple[str, ...] = ()

    @property
    def known_tools(self) -> tuple[str, ...]:
        """All built-in tools in their fixed order, then those of the user's toolsets: the columns of `tool_stats`."""
        own = (tool.name for toolset in self.offered.values() for tool in toolset.tools)
        return tuple(dict.fromkeys((*TOOL_TO_TOOLSET_MAP, *own)))


async def check(config: RunConfig) -> Plan:
    """Everything that can be known before the run: dataset, distribution, toolsets, sandbox, endpoint.

    Raises `UsageError` or `SetupError` with the mend, `NotReady` where several things are missing; nothing has been
    started or written then.
    """
    config.validate()
    parse_filters(config.filters)
    dataset = read_tasks(config.dataset_file, prompt_field=config.prompt_field, max_samples=config.max_samples)
    mcp = await ask_mcp_servers(config.mcp_config)
    own = own_toolsets(config, mcp)
    known = [*plugins.names("toolsets"), *own]
    tools = known_tools(own) if config.distributions_file else None  # else plug-ins would be loaded for nothing
    distributions = load_distributions(config.distributions_file, toolsets=known, tools=tools, used=config.distribution)
    distribution = find_distribution(distributions, config.distribution)
    offer = find_toolsets(config, dataset, distribution, own)
    config = _ready(config, offer)
    warnings = list(select.warnings_for(config.model))
    if config.sandbox.kind in NOT_ISOLATED:
        warnings.append(f"--sandbox={config.sandbox.kind} isolates nothing: {NOT_ISOLATED[config.sandbox.kind]}")
    if config.model.reasoning_disabled and "no_reasoning" in config.filters:
        warnings.append(
            "--reasoning_disabled with the no_reasoning filter will discard every session; "
            "give --filters=unknown_tool to keep them."
        )
    if config.max_cost is not None and not Prices(config.model).always_known():
        warnings.append(
            f"No price of {config.model.name} is known: --max_cost counts only what the endpoint itself reports."
        )
    warnings += [f"Left out: {name} ({reason})" for name, reason in offer.missing.items()]
    if bare := sum(bool(task.toolsets) and offer.missing.keys() >= set(task.toolsets or ()) for task in dataset.tasks):
        warnings.append(f"Prompts whose toolsets are all left out, and which run without tools: {bare}.")
    warnings += _images_that_cannot_be(config, dataset)
    if not config.model.local:
        warnings += await select.probe(config.model)
    return Plan(config, dataset, distribution, offer.toolsets, offer.missing, offer.always, mcp, tuple(warnings))


def _images_that_cannot_be(config: RunConfig, dataset: Dataset) -> list[str]:
    """A warning where some rows name an image and the sandbox has none; `SetupError` where all of them do."""
    rows = sum(bool(task.image) for task in dataset.tasks)
    if not rows or sandbox_class(config).capabilities.images:
        return []
    name = f"an image, and --sandbox={config.sandbox.kind} has none"
    if rows == len(dataset.tasks):
        raise SetupError(f"Every prompt names {name}.", "Give --sandbox=docker.")
    return [f"Prompts that name {name}; they will fail: {rows}."]


def _ready(config: RunConfig, offer: Offer) -> RunConfig:
    """The settings with the endpoint's key. Raises `SetupError` or `NotReady` for all that is missing here, at once."""
    missing: list[SetupError] = []
    key = ""
    try:
        if not config.model.local:
            key = find_api_key(config.model.base_url, config.model.api_key)
        elif reason := embedded_problem():
            missing.append(SetupError(reason))
    except SetupError as error:
        missing.append(error)
    try:
        if problem := sandbox_class(config).problem(config.sandbox.options):
            missing.append(SetupError(problem))
        else:
            check_limits(sandbox_class(config), config.sandbox)
    except SetupError as error:
        missing.append(error)
    mend = "`gristmill doctor` shows what works here."
    if offer.missing and not (config.skip_unavailable_toolsets and offer.toolsets):
        missing += [SetupError(f"Toolset {name}: {reason}") for name, reason in offer.missing.items()]
        if not config.skip_unavailable_toolsets:
            mend = f"To do without: --skip_unavailable_toolsets, or a --distribution such as terminal_only. {mend}"
    if len(missing) > 1:
        raise NotReady(f"This run cannot start here: {len(missing)} things are missing.", [*map(str, missing)], mend)
    if missing:
        raise SetupError(missing[0].message, missing[0].mend or mend)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, api_key=key))


def sandbox_class(config: RunConfig) -> type[SandboxProvider]:
    """The provider of the run's sandboxes. Raises `UsageError` for an unknown kind."""
    found: type[SandboxProvider] = plugins.find("sandboxes", config.sandbox.kind)
    return found


async def make_runner(config: RunConfig, listen: events.Listener, *, in_process: bool = False) -> Runner:
    """A runner that is ready to run; the run directory is made or opened, and locked.

    `in_process` runs the sessions in this process instead of in workers: for scripts and tests.
    """
    plan = await check(config)
    store = RunStore.open(
        config,
        plan.dataset,
        known_tools=plan.known_tools,
        resume=config.resume,
        allow_changes=config.allow_changes,
        filters=[active for active in parse_filters(config.filters) if active.filter.when == "merge"],
    )
    try:
        return _assemble(plan, store, listen, in_process=in_process)
    except BaseException:
        store.close()
        raise


def _assemble(plan: Plan, store: RunStore, listen: events.Listener, *, in_process: bool) -> Runner:
    config, dataset = plan.config, plan.dataset
    found = store.owed(dataset.tasks, config.samples_per_prompt, config.retry)
    batches = Batches((item.task.index for item in found.owed), config.batch_size, store.next_batch)
    specs = plan_sessions(plan, found.owed, batches, seed=store.seed)
    count = len(batches.sessions)
    planned = events.RunPlanned.of(config, dataset, batches=count, seed=store.seed, directory=str(store.layout.root))
    resumed = None
    if config.resume:
        resumed = events.Resumed(
            prompts=dataset.rows,
            completed=found.completed,
            owed=len(found.owed),
            new_batches=count,
            changes=store.changes,
        )
    parts = _Parts(plan, store, listen, in_process=in_process)
    return Runner(
        config,
        planned,
        store,
        specs,
        batches,
        parts.start,
        listen,
        resumed=resumed,
        warnings=(*plan.warnings, *store.notes),
        release=parts.stop,
    )


def plan_sessions(plan: Plan, owed: list[Owed], batches: Batches, *, seed: int) -> Iterator[SessionSpec]:
    """Every owed session with its batch and its drawn toolsets, made as it is asked for: there may be a million.

    Pure: the draw is the same for any order and number of workers.
    """
    for item, batch in zip(owed, batches.of, strict=True):
        task = item.task
        if task.toolsets is not None:
            names, probability = tuple(name for name in task.toolsets if name not in plan.missing), 1.0
        else:
            draw = sample(plan.distribution, session_rng(seed, task.key, item.sample))
            # A draw of which nothing works here gets the first toolset that does: no draw leaves a session without.
            works = tuple(name for name in draw.names if name not in plan.missing)
            names, probability = (*works, *plan.always) or tuple(plan.offered)[:1], draw.probability
        yield SessionSpec(
            task=task,
            sample=item.sample,
            batch=batch,
            attempt=item.attempt,
            toolsets=names,
            probability=probability,
            seed=seed,
        )


class _Parts:
    """What runs beside the runner while it mills: the embedded model's server and the executor."""

    def __init__(self, plan: Plan, store: RunStore, listen: events.Listener, *, in_process: bool) -> None:
        self._plan = plan
        self._store = store
        self._listen = listen
        self._in_process = in_process
        self._server: EmbeddedServer | None = None
        self._executor: Executor | None = None

    async def start(self) -> Executor:
        config = self._plan.config
        if config.model.local:
            self._server = EmbeddedServer(slots=min(config.sessions_in_flight, 8))
            url = await self._server.start()
            served = msgspec.structs.replace(config.model, base_url=url, api_key="")
            config = msgspec.structs.replace(config, model=served)
        # What earlier invocations used counts only against a limit.
        spent = self._store.spent if config.max_cost or config.max_total_tokens else Usage()
        budget = Budget(
            max_cost=config.max_cost,
            max_tokens=config.max_total_tokens,
            max_time=config.max_time,
            pause_limit=config.pause_limit,
            spent_cost=spent.cost_usd,
            spent_tokens=spent.total_tokens,
            spent_calls=self._store.calls() if spent.total_tokens else 0,
            on_pause=lambda reason, seconds: self._listen(events.Paused(reason=reason, seconds=seconds)),
            on_resume=self._go_on,
        )
        workers = 1 if self._in_process else min(config.num_workers, config.sessions_in_flight)
        begin = frames.Begin(
            config=config,
            run_id=self._store.run_id,
            seed=self._store.seed,
            known_tools=tuple(self._store.manifest.known_tools),
            toolsets=tuple(self._plan.offered),
            mcp=msgspec.msgpack.encode(self._plan.mcp) if self._plan.mcp is not None else b"",
            workers=workers,
            slots=-(-config.sessions_in_flight // workers),
            budgeted=budget.limited,
        )
        if self._in_process:
            kit = make_kit(begin, LocalGate(budget))
            self._executor = LocalExecutor(kit, config.sessions_in_flight, budget)
        else:
            shape = row_shape(begin)
            self._executor = ProcessExecutor(
                begin,
                workers=workers,
                concurrency=config.sessions_in_flight,
                # Not from the current directory, where a user's random.py would take the place of Python's own.
                command=[sys.executable, "-P", "-m", "gristmill.build"],
                lost=lambda spec, reason: lost_session(spec, reason, shape),
                budget=budget,
                environment=_with_this_package(os.environ),
            )
        return self._executor

    def _go_on(self) -> None:
        self._listen(events.Unpaused())
        if self._executor is not None:
            self._executor.wake()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        if isinstance(self._executor, ProcessExecutor) and self._executor.crashes:
            # What a killed worker left is removed by the next one that starts; the last one has none after it.
            config = self._plan.config
            with contextlib.suppress(OSError):
                sandbox_class(config)(options=config.sandbox.options).close()


def _with_this_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, in which this package is found too where it runs from a checkout."""
    place = Path(__file__).parents[1]
    if place.name in ("site-packages", "dist-packages"):
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (str(place), environment.get("PYTHONPATH"))))}


def row_shape(begin: frames.Begin) -> RowShape:
    """What all rows of the run share."""
    config = begin.config
    return RowShape(model=config.model.name, known_tools=begin.known_tools, sandbox=config.sandbox.kind)


def make_kit(begin: frames.Begin, gate: Gate) -> Kit:
    """What the sessions of one worker share."""
    config = begin.config
    mcp = msgspec.msgpack.decode(begin.mcp, type=McpServers) if begin.mcp else None
    own = own_toolsets(config, mcp)
    model = select.make_model(config.model, concurrency=begin.slots, workers=begin.workers)
    vision_config = _vision(config)
    vision = model
    if vision_config is not None:
        vision = select.make_model(vision_config, concurrency=begin.slots, workers=begin.workers)
    options = {**config.sandbox.options, HIDDEN: str(Path(config.output_dir).resolve())}
    kit = Kit(
        model=model,
        sandboxes=pooled(sandbox_class(config)(options=options), config.sandbox, begin.run_id),
        sandbox=config.sandbox,
        toolsets={name: own.get(name) or load_toolset(name) for name in begin.toolsets},
        settings=SessionSettings(
            max_turns=config.max_turns,
            session_timeout=config.session_timeout,
            max_tokens=config.model.max_tokens,
            ephemeral_system_prompt=config.ephemeral_system_prompt,
            prefill=tuple(msgspec.convert(message, Message) for message in config.prefill_messages),
        ),
        shape=row_shape(begin),
        filters=tuple(active for active in parse_filters(config.filters) if active.filter.when == "session"),
        run_id=begin.run_id,
        tool_settings=config.tool_settings,
        allow_private_urls=config.allow_private_urls,
        vision=vision,
        vision_name=(vision_config or config.model).name,
        gate=gate,
    )
    if isinstance(kit.sandboxes, PooledSandboxes):
        kit.shared_closers.append(kit.sandboxes.drain)
    if vision_config is not None:
        kit.shared_closers.append(vision.close)
    return kit


def _vision(config: RunConfig) -> ModelConfig | None:
    """The endpoint of `VISION_MODEL`; None where the session's own model looks at pictures itself."""
    name = config.tool_settings.get("VISION_MODEL")
    if not name:
        return None
    base_url = config.tool_settings.get("VISION_BASE_URL")
    if base_url is None:
        return msgspec.structs.replace(config.model, name=name)
    return ModelConfig(name=name, base_url=base_url, api_key=config.tool_settings.get("VISION_API_KEY", ""))


def main() -> None:
    """A worker process: its socket is the file descriptor of the first argument."""
    run: Callable[..., None] = asyncio.run
    try:
        import uvloop

        run = uvloop.run
    except ImportError:  # not on Windows
        pass
    run(serve(int(sys.argv[1]), make_kit))


if __name__ == "__main__":
    main()
