import pytest

from service_kit.logs import configure_logs


@pytest.fixture(autouse=True)
def service_logs():
    """The service's own log format: structlog's default one renders local variables, which takes seconds."""
    configure_logs("info")
