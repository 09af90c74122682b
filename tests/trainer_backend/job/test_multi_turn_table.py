"""[multi_turn]: what the run would ignore, or no task app would know, is refused when the job is read."""

import pytest

from tests.conftest import tiny_job
from trainer_backend.errors import JobError


@pytest.mark.parametrize(
    ("enabled", "tools", "told"),
    [
        (True, ["deleteContex"], "unknown context tool 'deleteContex'.*Did you mean 'deleteContext'"),
        (True, ["undoEdit", "undoEdit"], "'undoEdit' is named more than once"),
        (False, ["undoEdit"], "statelm_enabled is false: none of them would be offered"),
    ],
)
def test_context_tools_are_known_named_once_and_offered(enabled, tools, told):
    with pytest.raises(JobError, match=told):
        tiny_job(
            multi_turn__enable=True, multi_turn__statelm_enabled=enabled, multi_turn__context_tools=tools
        )
