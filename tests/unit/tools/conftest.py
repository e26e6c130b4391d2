from collections.abc import AsyncIterator

import pytest

from support.toolboxes import Bench, bench


@pytest.fixture
async def tools() -> AsyncIterator[Bench]:
    """The toolsets file and terminal in a sandbox of the kind host."""
    async with bench() as made:
        yield made
