"""Which dialect an endpoint is spoken to in, the model of a worker, and the check before a run."""

from __future__ import annotations

from gristmill.config import ModelConfig, without_credentials
from gristmill.errors import ErrorKind, ModelError, SetupError
from gristmill.model import anthropic, classify, hosts, jsontext
from gristmill.model.adaptive import Limiter
from gristmill.model.anthropic import AnthropicDialect
from gristmill.model.chat import ChatDialect
from gristmill.model.client import EndpointModel
from gristmill.model.dialect import Dialect
from gristmill.model.hermes import HermesDialect
from gristmill.model.json_schema import JsonDialect
from gristmill.model.pricing import Prices
from gristmill.model.retry import Backoff
from gristmill.model.transport import Timeouts, Transport

PROBE_SECONDS = 10.0


def dialect_name(config: ModelConfig) -> str:
    """The dialect; `auto` decides by host and model."""
    if config.dialect != "auto":
        return config.dialect
    if config.local:
        return "json"
    return "anthropic" if config.host.endswith("anthropic.com") else "chat"


def make_dialect(config: ModelConfig) -> Dialect:
    """The dialect with the settings of a run."""
    name = dialect_name(config)
    if name == "anthropic":
        return AnthropicDialect(config)
    chat = ChatDialect(config)
    if name == "json":
        return JsonDialect(chat, compact=config.local)
    return HermesDialect(chat) if name == "hermes" else chat


def make_model(
    config: ModelConfig, *, concurrency: int = 256, workers: int = 1, backoff: Backoff | None = None
) -> EndpointModel:
    """The model that all sessions of one worker share. Nothing is connected yet; `close` it at the end.

    Args:
        config: the settings; for the embedded model with `base_url` of the server that the runner has started.
        concurrency: sessions that this worker has in flight, the most that it ever asks at once.
        workers: how many workers ask this endpoint.
        backoff: None is the usual one, with the retries of the settings.
    """
    dialect = make_dialect(config)
    timeouts = Timeouts(total=config.request_timeout, idle=min(config.request_timeout, 120.0))
    return EndpointModel(
        dialect,
        Transport(config.base_url, dialect.headers(), timeouts=timeouts),
        backoff=backoff or Backoff(retries=config.max_retries),
        limiter=Limiter(concurrency, peers=workers),
        prices=Prices(config),
        stream=config.stream,
        secret=config.api_key.strip(),
    )


async def probe(config: ModelConfig) -> list[str]:
    """Ask the endpoint, before a run, for its list of models. Returns warnings, one sentence each.

    An endpoint without such a list passes. Raises `SetupError` where it cannot be reached or refuses the key.
    """
    dialect = make_dialect(config)
    transport = Transport(config.base_url, dialect.headers())
    models = dialect.path.removesuffix("/messages").removesuffix("/chat/completions") + "/models"
    where = without_credentials(config.base_url)
    try:
        # OpenRouter's list is public: only its /key tells whether the key is good.
        for path in ("/key", models) if hosts.host_of(config).routes else (models,):
            status, body = await transport.get(path, seconds=PROBE_SECONDS)
            error = classify.classify(status, body)
            if error.kind is ErrorKind.AUTH:
                raise error
    except ModelError as error:
        message = classify.scrub(error, config.api_key.strip()).message
        raise SetupError(
            f"The endpoint {where} cannot be used: {message}.", error.mend or "Check --base_url."
        ) from None
    finally:
        await transport.close()
    return _about_model(config, status, body)


def _about_model(config: ModelConfig, status: int, body: bytes) -> list[str]:
    if status != 200 or config.local:
        return []
    try:
        data = jsontext.decode(body)
    except ValueError:
        return []
    listed = data.get("data") if isinstance(data, dict) else None
    names = [str(item["id"]) for item in listed or () if isinstance(item, dict) and item.get("id")]
    known = {name.removeprefix("models/") for name in names}
    if not known or config.name in known or config.name.partition(":")[0] in known:
        return []
    some = ", ".join(sorted(known)[:5])
    return [f"The endpoint does not list the model {config.name}; it lists {some}{' …' if len(known) > 5 else ''}."]


def warnings_for(config: ModelConfig) -> list[str]:
    """One sentence for each flag that has no effect with this endpoint."""
    if dialect_name(config) == "anthropic":
        return anthropic.warnings_for(config)
    return hosts.warnings_for(config)
