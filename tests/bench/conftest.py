from collections.abc import Iterator

import pytest

from service_kit.logs import configure_logs
from tests.conftest import TASK_APP_KEY, task_app


@pytest.fixture(autouse=True)
def service_logs() -> None:
    """As a service logs: structlog's default renders the local variables of errors, which takes seconds."""
    configure_logs("warning")


@pytest.fixture(scope="session")
def services() -> Iterator[str]:
    """The setting of a job that plays at the task app of the tests."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ENVIRONMENT_API_KEY", TASK_APP_KEY.get_secret_value())
        yield f'services.task_url="{task_app()}"'
