"""Which endpoint understands what: the fields for reasoning, routing and limits, per host, as data.

`docs/endpoints.md` has the same as a table, each row with its source. To teach a new host, add a row to `HOSTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gristmill.config import EFFORTS, ModelConfig
from gristmill.types import Message

EffortForm = Literal["openrouter", "effort", "thinking", "together", "template"]


@dataclass(frozen=True)
class Host:
    """What one host understands.

    Args:
        name: as users call it.
        suffixes: host names, or ends of them.
        form: how it is told whether and how much to reason.
        efforts: the efforts that it accepts; others are sent as the nearest one below.
        back: the fields in which it takes earlier reasoning, the first that the answer had; None: every form that the
            answer had, and `reasoning_content`.
        max_tokens_field: the name of the output limit.
    """

    name: str
    suffixes: tuple[str, ...]
    form: EffortForm
    efforts: tuple[str, ...]
    back: tuple[str, ...] | None
    max_tokens_field: str = "max_tokens"

    @property
    def routes(self) -> bool:
        """True where `provider` chooses between upstream providers."""
        return self.form == "openrouter"


_UP_TO_HIGH = ("none", "low", "medium", "high")
_UP_TO_XHIGH = ("none", "minimal", "low", "medium", "high", "xhigh")

OPENROUTER = Host("OpenRouter", ("openrouter.ai",), "openrouter", _UP_TO_XHIGH, ("reasoning_details", "reasoning"))
HOSTS: tuple[Host, ...] = (
    OPENROUTER,
    Host("OpenAI", ("api.openai.com", "openai.azure.com"), "effort", _UP_TO_XHIGH, (), "max_completion_tokens"),
    Host("DeepSeek", ("api.deepseek.com",), "thinking", EFFORTS, ("reasoning_content",)),
    Host("Z.AI", ("api.z.ai", "open.bigmodel.cn"), "thinking", EFFORTS, ("reasoning_content",)),
    Host("Fireworks", ("api.fireworks.ai",), "effort", EFFORTS, ("reasoning_content",)),
    Host("Together", ("api.together.xyz", "api.together.ai"), "together", _UP_TO_HIGH, ("reasoning",)),
    Host("Mistral", ("api.mistral.ai",), "effort", _UP_TO_HIGH, ("content",)),
    Host("Groq", ("api.groq.com",), "effort", _UP_TO_HIGH, ("reasoning",)),
    Host("xAI", ("api.x.ai",), "effort", _UP_TO_HIGH, ()),
    Host("Gemini", ("generativelanguage.googleapis.com",), "effort", ("none", "minimal", "low", "medium", "high"), ()),
)
OWN_SERVER = Host("a server of one's own", (), "template", EFFORTS, None)


def host_of(config: ModelConfig) -> Host:
    """What is known of the endpoint's host; an unknown one is taken for a server of one's own."""
    if config.local:
        return OWN_SERVER
    name = config.host
    return next(
        (h for h in HOSTS if any(name == end or name.endswith("." + end) for end in h.suffixes)),
        OWN_SERVER,
    )


def nearest(effort: str, efforts: tuple[str, ...]) -> str:
    """The effort itself where it is accepted, else the next lower one, else the lowest."""
    below = [e for e in EFFORTS[: EFFORTS.index(effort) + 1] if e in efforts]
    return below[-1] if below and (below[-1] != "none" or effort == "none") else next(e for e in efforts if e != "none")


def headers(config: ModelConfig) -> dict[str, str]:
    """Headers that only this host wants."""
    return {"X-Title": "gristmill"} if host_of(config).routes else {}


def request_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a chat completion that the flags ask for, in the words of this host."""
    host = host_of(config)
    fields = _reasoning_fields(host, config)
    if host.routes:
        routing = {
            "only": list(config.providers_allowed),
            "ignore": list(config.providers_ignored),
            "order": list(config.providers_order),
            "sort": config.provider_sort,
        }
        chosen = {name: value for name, value in routing.items() if value}
        if chosen:
            fields["provider"] = chosen
    if config.record_tokens and host is OWN_SERVER:
        fields |= {"logprobs": True, "return_token_ids": True}
    return fields


def _reasoning_fields(host: Host, config: ModelConfig) -> dict[str, Any]:
    asked = "none" if config.reasoning_disabled else config.reasoning_effort
    if host.form == "openrouter":
        return _openrouter_reasoning(host, config.name, asked)
    if asked is None:
        return {}
    effort = nearest(asked, host.efforts)
    off = effort == "none"
    if host.form == "effort":
        return {"reasoning_effort": effort}
    if host.form == "thinking":
        if off:
            return {"thinking": {"type": "disabled"}}
        # Z.AI forgets earlier reasoning unless it is told not to.
        keep = {"clear_thinking": False} if host.name == "Z.AI" else {}
        return {"thinking": {"type": "enabled", **keep}, "reasoning_effort": effort}
    if host.form == "together":
        return {"reasoning": {"enabled": not off}} | ({} if off else {"reasoning_effort": effort})
    # Chat templates differ in the name of the switch: Qwen and GLM read the one, DeepSeek and Granite the other.
    switches: dict[str, Any] = {"enable_thinking": not off, "thinking": not off}
    if off:
        return {"chat_template_kwargs": switches}
    fields: dict[str, Any] = {"chat_template_kwargs": {**switches, "reasoning_effort": effort}}
    if effort in ("low", "medium", "high"):  # vLLM refuses others at the top level
        fields["reasoning_effort"] = effort
    return fields


def _openrouter_reasoning(host: Host, model: str, asked: str | None) -> dict[str, Any]:
    if asked is None:
        # Claude and others reason only when asked, and sessions without reasoning are usually discarded.
        return {"reasoning": {"enabled": True}}
    if asked == "none":
        return {"reasoning": {"enabled": False}}
    fields: dict[str, Any] = {"reasoning": {"enabled": True, "effort": nearest(asked, host.efforts)}}
    if model.startswith("anthropic/") and asked in ("xhigh", "max", "ultra"):
        fields["verbosity"] = "xhigh" if asked == "xhigh" else "max"
    return fields


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


def wants_cache_marks(config: ModelConfig) -> bool:
    """True where the provider caches only what is marked: Claude and Qwen behind OpenRouter."""
    return host_of(config).routes and config.name.startswith(("anthropic/", "qwen/"))


def warnings_for(config: ModelConfig) -> list[str]:
    """One sentence for each flag that has no effect with this endpoint, or another one than it says."""
    host = host_of(config)
    found = []
    given = [
        flag
        for flag, value in (
            ("--providers_allowed", config.providers_allowed),
            ("--providers_ignored", config.providers_ignored),
            ("--providers_order", config.providers_order),
            ("--provider_sort", config.provider_sort),
        )
        if value
    ]
    if given and not host.routes:
        verb = "has" if len(given) == 1 else "have"
        where = "the embedded model" if config.local else config.host
        found.append(f"{', '.join(given)} {verb} no effect with {where}: only OpenRouter routes between providers.")
    asked = "none" if config.reasoning_disabled else config.reasoning_effort
    if asked is not None and config.local:
        flag = "--reasoning_disabled" if config.reasoning_disabled else "--reasoning_effort"
        found.append(f"{flag} has no effect with the embedded model: it does not reason.")
    elif asked is not None and nearest(asked, host.efforts) != asked:
        found.append(f"{host.name} has no reasoning effort {asked}: {nearest(asked, host.efforts)} is sent instead.")
    if config.record_tokens and host is not OWN_SERVER:
        found.append(f"--record_tokens has no effect with {host.name}: it does not return token ids.")
    return found
