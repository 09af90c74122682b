from collections.abc import Iterator

import pytest

from service_kit.logs import configure_logs
from service_kit.server import Listener, ServerThread
from task_app.app import create_app
from task_app.settings import Settings


@pytest.fixture(autouse=True)
def service_logs() -> None:
    """As a service logs: structlog's default renders the local variables of errors, which takes seconds."""
    configure_logs("warning")


@pytest.fixture(scope="session")
def services() -> Iterator[str]:
    """The setting of a job that plays at a task app of this process, which is there already."""
    key = "the-key-of-the-benches"
    listener = Listener("127.0.0.1", 0)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ENVIRONMENT_API_KEY", key)
        with ServerThread(create_app(Settings(api_keys=(key,))), listener) as url:
            yield f'services.task_url="{url}"'
