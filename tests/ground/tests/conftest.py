from collections.abc import AsyncIterator

import pytest

from ground.api import Api
from ground.local import LocalNode
from ground.space import Space
from ground.space import space as make_space


@pytest.fixture
async def space(api: Api, local_node: LocalNode) -> AsyncIterator[Space]:
    async with make_space(api, local_node) as made:
        yield made
