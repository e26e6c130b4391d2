"""What a call costs: what the provider reports, else the price list of `genai-prices`, else unknown.

`genai-prices` (pip install gristmill[prices]) is optional; its list comes with the package, nothing is fetched. It is
imported on first use, by workers in a thread, for that takes a while. Servers on loopback have no list price.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import Any

import msgspec

from gristmill.config import ModelConfig, is_loopback
from gristmill.model.hosts import host_of
from gristmill.types import Usage


class Prices:
    """The prices of one endpoint and model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._listed = not is_loopback(config.host) and importlib.util.find_spec("genai_prices") is not None
        self._importing: asyncio.Future[Any] | None = None

    async def priced(self, usage: Usage, *, raw: Any = None) -> Usage:
        """The usage with its cost, if that can be told; `raw` is the provider's own, for what went into a cache."""
        if usage.cost_known:
            return usage
        if self._config.local:
            return msgspec.structs.replace(usage, cost_known=True)
        if not self._listed:
            return usage
        if self._importing is None:
            self._importing = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, "genai_prices"))
        if not self._importing.done():
            await asyncio.shield(self._importing)
        cost = self._cost(usage, _cache_writes(raw))
        return usage if cost is None else msgspec.structs.replace(usage, cost_usd=cost, cost_known=True)

    def _cost(self, usage: Usage, cache_write_tokens: int) -> float | None:
        if not self._listed or not usage.total_tokens:
            return None
        import genai_prices

        tokens: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "cache_read_tokens": usage.cached_tokens or None,
            "cache_write_tokens": cache_write_tokens or None,
        }
        try:
            price = genai_prices.calc_price(
                genai_prices.Usage(**tokens), self._config.name, provider_api_url=_https(self._config.base_url)
            )
        except (LookupError, ValueError):
            # Neither the host nor the model is in the list: ask no more.
            self._listed = False
            return None
        return float(price.total_price)

    def always_known(self) -> bool:
        """True where every call has a cost: a listed model, or an endpoint that reports it (OpenRouter)."""
        return host_of(self._config).routes or self.estimate(1, 1) is not None

    def estimate(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """US dollars that these tokens would cost; None where no price is known."""
        if self._config.local:
            return 0.0
        return self._cost(Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens), 0)


def _https(url: str) -> str:
    """The list names hosts by their https addresses; a price belongs to the host."""
    return url.replace("http://", "https://", 1) if url.startswith("http://") else url


def _cache_writes(raw: Any) -> int:
    """Tokens written to a cache, which some providers charge more for (Anthropic, OpenRouter)."""
    if not isinstance(raw, dict):
        return 0
    details = raw.get("prompt_tokens_details") or {}
    return raw.get("cache_creation_input_tokens") or details.get("cache_write_tokens") or 0
