"""A trainer service for each test that wants one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.trainer_backend.api.served import Served, serving, settings_for


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(settings_for(tmp_path / "runs")) as found:
        yield found
