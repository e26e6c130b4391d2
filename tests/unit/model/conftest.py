"""A model at a scripted endpoint, with short waits."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gristmill.config import ModelConfig
from gristmill.model.client import EndpointModel
from gristmill.model.retry import Backoff
from gristmill.model.select import make_model


@pytest.fixture
async def model_at() -> AsyncIterator[Callable[..., EndpointModel]]:
    """`model_at(url, stream=True, …)`: a model with these settings, closed at the end."""
    opened: list[EndpointModel] = []

    def open_model(url: str, **settings: Any) -> EndpointModel:
        config = ModelConfig(**{"name": "scripted", "base_url": url, **settings})
        model = make_model(config, backoff=Backoff(retries=config.max_retries, first=0.01))
        opened.append(model)
        return model

    yield open_model
    for model in opened:
        await model.close()
