"""Which endpoint understands what: the fields for reasoning, routing and limits, per host, as data.

The table with its sources is in `docs/endpoints.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gristmill.config import ModelConfig, is_loopback
from gristmill.types import Message

EffortForm = Literal["openrouter", "reasoning_effort", "thinking_type", "template", "none"]


@dataclass(frozen=True)
class Host:
    """What one host understands.

    Args:
        name: as users call it.
        suffixes: host names, or ends of them.
        effort: the form in which it takes a reasoning effort and the switch-off.
        back: the fields in which it takes earlier reasoning; None: any server of one's own, which gets every form that
            the answer had, and `reasoning_content`.
        max_tokens_field: the name of the output limit.
        routing: takes OpenRouter's `provider`.
    """

    name: str
    suffixes: tuple[str, ...]
    effort: EffortForm
    back: tuple[str, ...] | None
    max_tokens_field: str = "max_tokens"
    routing: bool = False


HOSTS: tuple[Host, ...] = (
    Host("OpenRouter", ("openrouter.ai",), "openrouter", ("reasoning_details", "reasoning"), routing=True),
    Host("OpenAI", ("api.openai.com", "openai.azure.com"), "reasoning_effort", (), "max_completion_tokens"),
    Host("DeepSeek", ("api.deepseek.com",), "thinking_type", ("reasoning_content",)),
    Host("Mistral", ("api.mistral.ai",), "none", ("content",)),
    Host("Groq", ("api.groq.com",), "reasoning_effort", ("reasoning",)),
    Host("xAI", ("api.x.ai",), "reasoning_effort", ()),
    Host("Gemini", ("generativelanguage.googleapis.com",), "reasoning_effort", ()),
)
SELF_HOSTED = Host("a server of one's own", (), "template", None)


def host_of(config: ModelConfig) -> Host:
    """What is known of the endpoint's host."""
    name = config.host
    return next(
        (h for h in HOSTS if any(name == end or name.endswith("." + end) for end in h.suffixes)),
        SELF_HOSTED,
    )


def headers(config: ModelConfig) -> dict[str, str]:
    """Headers that only this host wants."""
    return {"X-Title": "gristmill"} if host_of(config).routing else {}


def request_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a chat completion that the flags ask for, in the words of this host."""
    host = host_of(config)
    fields = _reasoning_fields(host, config)
    if host.routing:
        fields["usage"] = {"include": True}
        routing = {
            "only": list(config.providers_allowed),
            "ignore": list(config.providers_ignored),
            "order": list(config.providers_order),
            "sort": config.provider_sort,
        }
        chosen = {name: value for name, value in routing.items() if value}
        if chosen:
            fields["provider"] = chosen
    return fields


def _reasoning_fields(host: Host, config: ModelConfig) -> dict[str, Any]:
    effort = "none" if config.reasoning_disabled else config.reasoning_effort
    if effort is None or host.effort == "none":
        return {}
    off = effort == "none"
    if host.effort == "openrouter":
        return {"reasoning": {"enabled": False} if off else {"effort": effort}}
    if host.effort == "reasoning_effort":
        return {"reasoning_effort": effort}
    if host.effort == "thinking_type":
        return {"thinking": {"type": "disabled" if off else "enabled"}}
    switches = {"enable_thinking": not off, "thinking": not off}
    return {"chat_template_kwargs": switches} if off else {"chat_template_kwargs": switches, "reasoning_effort": effort}


def reasoning_back(host: Host, message: Message) -> dict[str, Any]:
    """The fields of an earlier answer that go back with it."""
    raw = {name: value for name, value in message.extra.items() if name != "call_extra"}
    if host.back is None:
        if message.reasoning and "content" not in raw:
            raw["reasoning_content"] = raw.get("reasoning_content") or message.reasoning
        return raw
    for name in host.back:
        if raw.get(name):
            return {name: raw[name]}
    text = next((name for name in host.back if name in ("reasoning_content", "reasoning")), "")
    return {text: message.reasoning} if text and message.reasoning else {}


def warnings_for(config: ModelConfig) -> list[str]:
    """One sentence for each flag that has no effect with this endpoint."""
    host = host_of(config)
    where = host.name if host is not SELF_HOSTED or not is_loopback(config.host) else f"the endpoint {config.host}"
    found = []
    routing = {
        "--providers_allowed": config.providers_allowed,
        "--providers_ignored": config.providers_ignored,
        "--providers_order": config.providers_order,
        "--provider_sort": config.provider_sort,
    }
    given = [flag for flag, value in routing.items() if value]
    if given and not host.routing:
        found.append(f"{', '.join(given)} has no effect with {where}: only OpenRouter routes between providers.")
    if (config.reasoning_effort or config.reasoning_disabled) and host.effort == "none":
        found.append(f"--reasoning_effort and --reasoning_disabled have no effect with {where}.")
    return found
