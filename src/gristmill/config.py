"""Settings of a run: frozen data, validated when made, unknown keys refused. The only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from gristmill.errors import SetupError, UsageError
from gristmill.types import Limits

DEFAULT_BASE_URL = "https://openrouter.ai/api/v1"
DEFAULT_MODEL = "anthropic/claude-sonnet-4.6"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
PROVIDER_SORTS = ("price", "throughput", "latency")
DIALECTS = ("auto", "chat", "anthropic", "hermes", "json")

# Which variable holds the key of which host; a key goes to no other host.
KEY_VARIABLES: Mapping[str, str] = {
    "openrouter.ai": "OPENROUTER_API_KEY",
    "api.openai.com": "OPENAI_API_KEY",
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "api.deepseek.com": "DEEPSEEK_API_KEY",
    "api.mistral.ai": "MISTRAL_API_KEY",
    "api.groq.com": "GROQ_API_KEY",
    "api.together.xyz": "TOGETHER_API_KEY",
    "api.fireworks.ai": "FIREWORKS_API_KEY",
    "api.x.ai": "XAI_API_KEY",
    "generativelanguage.googleapis.com": "GEMINI_API_KEY",
    "inference-api.nousresearch.com": "NOUS_API_KEY",
}

# Which variable names the image of rows without one; empty for kinds of sandboxes that have none.
IMAGE_VARIABLES: Mapping[str, str] = {
    "local": "",
    "host": "",
    "ssh": "",
    "singularity": "TERMINAL_SINGULARITY_IMAGE",
    "modal": "TERMINAL_MODAL_IMAGE",
    "daytona": "TERMINAL_DAYTONA_IMAGE",
}

# Variables of tool providers that tools may read through `ToolContext.settings`.
TOOL_VARIABLES = (
    "TAVILY_API_KEY",
    "EXA_API_KEY",
    "BRAVE_API_KEY",
    "FIRECRAWL_API_KEY",
    "FIRECRAWL_API_URL",
    "PARALLEL_API_KEY",
    "SEARXNG_URL",
    "GRISTMILL_CORPUS",
    "XDG_CACHE_HOME",
    "WEB_PROVIDER",
    "VISION_MODEL",
    "VISION_BASE_URL",
    "VISION_API_KEY",
    "IMAGE_MODEL",
    "IMAGE_BASE_URL",
    "IMAGE_API_KEY",
    "FAL_KEY",
    "BROWSER_EXECUTABLE",
)

# Those of them that shape what a session gets to read and are no secret.
TOOL_CHOICES = ("WEB_PROVIDER", "VISION_MODEL", "IMAGE_MODEL")


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings."""


class ModelConfig(_Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is asked, and how."""

    name: str = DEFAULT_MODEL
    base_url: str = DEFAULT_BASE_URL
    api_key: str = ""  # never written anywhere
    dialect: str = "auto"
    stream: bool = False
    max_tokens: int | None = None  # output tokens per call; None: the provider's default
    reasoning_effort: str | None = None
    reasoning_disabled: bool = False
    providers_allowed: tuple[str, ...] = ()
    providers_ignored: tuple[str, ...] = ()
    providers_order: tuple[str, ...] = ()
    provider_sort: str | None = None
    request_timeout: float = 600.0  # seconds of one request without an answer
    max_retries: int = 5  # further tries of a transient failure
    record_tokens: bool = False

    @property
    def local(self) -> bool:
        """True for the embedded model, which the runner serves itself."""
        return self.name == "local" or self.name.startswith("local/")

    @property
    def host(self) -> str:
        """The endpoint's host name, lower case."""
        return (urlsplit(self.base_url).hostname or "").lower()


class SandboxConfig(_Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the commands of a session run."""

    kind: str = "local"
    network: bool = False
    image: str = ""  # for rows without one
    cwd: str = ""
    limits: Limits = Limits()
    pool: int = 0  # started sandboxes that each worker keeps ready
    terminal_timeout: float = 180.0  # seconds of a command that names none
    options: dict[str, str] = {}


class RunConfig(_Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one run."""

    dataset_file: str
    batch_size: int
    run_name: str
    output_dir: str = "data"
    distribution: str = "default"
    distributions_file: str | None = None
    tools: tuple[str, ...] = ()  # the user's own toolsets as module:name
    mcp_config: str | None = None  # path of a file with `mcpServers`
    prompt_field: str = "prompt"
    model: ModelConfig = ModelConfig()
    sandbox: SandboxConfig = SandboxConfig()
    max_turns: int = 10
    num_workers: int = 4
    concurrency: int = 0  # sessions in flight over all workers; 0: 4 × workers
    session_timeout: float = 1800.0  # seconds
    resume: bool = False
    retry: tuple[str, ...] = ()
    allow_changes: bool = False
    max_samples: int | None = None
    samples_per_prompt: int = 1
    seed: int | None = None  # None: drawn and recorded
    ephemeral_system_prompt: str = ""
    prefill_messages: tuple[dict[str, str], ...] = ()
    filters: tuple[str, ...] = ("no_reasoning", "unknown_tool")
    max_cost: float | None = None  # US dollars
    max_total_tokens: int | None = None
    max_time: float | None = None  # seconds
    pause_limit: float = 600.0  # seconds that an empty account may pause the run
    skip_unavailable_toolsets: bool = False
    allow_private_urls: bool = False
    tool_settings: dict[str, str] = {}
    verbosity: Literal["quiet", "normal", "verbose"] = "normal"
    log_prefix_chars: int = 100

    @property
    def sessions_in_flight(self) -> int:
        """Sessions in flight over all workers."""
        return self.concurrency or 4 * self.num_workers

    def validate(self) -> None:
        """Raise `UsageError` for the first value that cannot be."""
        for flag, value in (
            ("--batch_size", self.batch_size),
            ("--max_turns", self.max_turns),
            ("--num_workers", self.num_workers),
            ("--samples_per_prompt", self.samples_per_prompt),
            ("--max_samples", 1 if self.max_samples is None else self.max_samples),
            ("--concurrency", self.concurrency or 1),
            ("--log_prefix_chars", self.log_prefix_chars),
            ("--max_tokens", 1 if self.model.max_tokens is None else self.model.max_tokens),
        ):
            if value < 1:
                raise UsageError(f"{flag} must be a whole number of at least 1, not {value}.")
        for flag, amount in (
            ("--session_timeout", self.session_timeout),
            ("--max_cost", self.max_cost),
            ("--max_total_tokens", self.max_total_tokens),
            ("--max_time", self.max_time),
        ):
            if amount is not None and not amount > 0:
                raise UsageError(f"{flag} must be more than 0, not {amount}.")
        limits = self.sandbox.limits
        for flag, number, least in (
            ("--sandbox_memory", limits.memory_mb, 32),
            ("--sandbox_disk", limits.disk_mb, 1),
            ("--sandbox_processes", limits.processes, 8),
            ("--sandbox_cpus", limits.cpus, 0.01),
            ("--sandbox_pool", self.sandbox.pool, 1),
        ):
            if number and not number >= least:
                raise UsageError(f"{flag} must be at least {least}, not {number}.")
        check_run_name(self.run_name)
        if self.model.dialect not in DIALECTS:
            raise UsageError(f"Unknown dialect: {self.model.dialect}.", f"Known are {', '.join(DIALECTS)}.")
        effort = self.model.reasoning_effort
        if effort is not None and effort not in EFFORTS:
            raise UsageError(f"Unknown reasoning effort: {effort}.", f"Known are {', '.join(EFFORTS)}.")
        sort = self.model.provider_sort
        if sort is not None and sort not in PROVIDER_SORTS:
            raise UsageError(f"Unknown provider sort: {sort}.", f"Known are {', '.join(PROVIDER_SORTS)}.")

    def public(self) -> dict[str, Any]:
        """The settings as plain data without any secret, as `run.json` holds them."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        data["model"].pop("api_key")
        # Keys never, but a run that goes on with other services is another run.
        data["tool_settings"] = {name: self.tool_settings.get(name, "") for name in TOOL_CHOICES}
        data["sandbox"].pop("options")
        # Sent to the model, never written: only whether they were there is recorded.
        data["ephemeral_system_prompt"] = bool(self.ephemeral_system_prompt)
        data["prefill_messages"] = len(self.prefill_messages)
        data["model"]["base_url"] = without_credentials(self.model.base_url)
        return data


def check_run_name(name: str) -> None:
    """Raise `UsageError` unless `name` is one plain path component."""
    rule = "It names a folder: one path component without separators, '..' or control characters."
    if not name or name in (".", "..") or len(name.encode("utf-8", "replace")) > 200:
        raise UsageError(f"--run_name {name!r} cannot be used.", rule)
    if any(c in "/\\" or not c.isprintable() for c in name) or name != name.strip():
        raise UsageError(f"--run_name {name!r} cannot be used.", rule)


def without_credentials(url: str) -> str:
    """The URL without user, password and query, fit for files and messages."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


def host_of(url: str) -> str:
    """The URL's host name in lower case; empty where it has none or is no URL."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """True for a host name or address of this machine."""
    return host in ("localhost", "::1", "0.0.0.0") or host.endswith(".localhost") or host.startswith("127.")


def find_api_key(base_url: str, given: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The key for an endpoint: the given one, else the variable that belongs to its host.

    Raises:
        SetupError: a remote host without a key.
    """
    env = os.environ if environ is None else environ
    if given:
        return given
    host = host_of(base_url)
    if variable := _key_variable(host):
        if key := env.get(variable, "").strip():
            return key
        raise SetupError(f"No API key for {host}.", f"Set {variable} or give --api_key.")
    if is_loopback(host):
        return ""
    raise SetupError(
        f"No API key for {host}.", "Give --api_key; a key in the environment is sent only to the host it belongs to."
    )


def keys_present(environ: Mapping[str, str] | None = None) -> dict[str, bool]:
    """For each variable that holds the key of a known host: whether it is set. Never the key itself."""
    env = os.environ if environ is None else environ
    return {variable: bool(env.get(variable, "").strip()) for variable in KEY_VARIABLES.values()}


def environment() -> Mapping[str, str]:
    """All of the environment, for a file of the user's that says which variables of it may be used."""
    return os.environ


def tool_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Keys and URLs of tool providers that the environment holds.

    A vision or image service at a host whose key has a variable of its own (OpenRouter, say) needs no other one.
    """
    env = os.environ if environ is None else environ
    found = {name: env[name] for name in TOOL_VARIABLES if env.get(name)}
    for kind in ("VISION", "IMAGE"):
        variable = _key_variable(host_of(found.get(f"{kind}_BASE_URL", "")))
        if env.get(variable) and f"{kind}_API_KEY" not in found:
            found[f"{kind}_API_KEY"] = env[variable]
    return found


def _key_variable(host: str) -> str:
    """The variable that holds the key of a host; empty for a host that has none of its own."""
    found = (name for suffix, name in KEY_VARIABLES.items() if host == suffix or host.endswith("." + suffix))
    return next(found, "")


def sandbox_from_environment(environ: Mapping[str, str] | None = None, *, kind: str | None = None) -> SandboxConfig:
    """The sandbox settings that the `TERMINAL_*` variables give; `kind`, where given, wins over `TERMINAL_ENV`.

    Raises `UsageError` for a value that is not a number.
    """
    env = os.environ if environ is None else environ
    kind = kind or env.get("TERMINAL_ENV") or "local"
    image = env.get(IMAGE_VARIABLES.get(kind, "TERMINAL_DOCKER_IMAGE"), "")
    return SandboxConfig(
        kind=kind,
        image=image,
        cwd=env.get("TERMINAL_CWD", ""),
        terminal_timeout=_number(env, "TERMINAL_TIMEOUT", 180.0),
        limits=Limits(
            cpus=_number(env, "TERMINAL_CONTAINER_CPU", 0.0),
            memory_mb=int(_number(env, "TERMINAL_CONTAINER_MEMORY", 0)),
            disk_mb=int(_number(env, "TERMINAL_CONTAINER_DISK", 0)),
        ),
        options={
            k: env[k]
            for k in ("TERMINAL_SSH_HOST", "TERMINAL_SSH_USER", "TERMINAL_SSH_PORT", "TERMINAL_SSH_KEY", "DOCKER_HOST")
            if env.get(k)
        },
    )


def container_hosts(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Where a container engine may answer: `DOCKER_HOST` alone where it is set, else the usual sockets, in order."""
    env = os.environ if environ is None else environ
    if given := env.get("DOCKER_HOST"):
        return (given,)
    runtime = env.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return (
        "unix:///var/run/docker.sock",
        f"unix://{runtime}/docker.sock",
        f"unix://{env.get('HOME', '')}/.docker/run/docker.sock",
        "unix:///run/podman/podman.sock",
        f"unix://{runtime}/podman/podman.sock",
    )


def container_tls(environ: Mapping[str, str] | None = None) -> str:
    """The folder of ca.pem, cert.pem and key.pem for a container engine over TCP; empty where it speaks plainly."""
    env = os.environ if environ is None else environ
    if not env.get("DOCKER_TLS_VERIFY"):
        return ""
    return env.get("DOCKER_CERT_PATH") or f"{env.get('HOME', '')}/.docker"


def singularity_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What Apptainer or SingularityCE needs of the environment: nothing that reaches into a container."""
    env = os.environ if environ is None else environ
    own = ("CACHEDIR", "CONFIGDIR", "TMPDIR", "DOCKER_USERNAME", "DOCKER_PASSWORD", "NOHTTPS")
    names = {f"{program}_{name}" for program in ("APPTAINER", "SINGULARITY") for name in own}
    names |= {"HOME", "PATH", "USER", "LOGNAME", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    names |= {"XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"}  # limits of an ordinary user are systemd's
    names |= {f(name) for name in ("http_proxy", "https_proxy", "no_proxy") for f in (str.lower, str.upper)}
    return {name: env[name] for name in sorted(names) if env.get(name)}


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name} must be a number, not {text!r}.") from None
    if not value >= 0:
        raise UsageError(f"{name} must not be negative, not {text!r}.")
    return value
