"""What the logs of both services look like, by the two variables that both read."""

import json
from typing import get_args

import pytest
import structlog

from service_kit.errors import SettingsError
from service_kit.logs import configure_logs_from
from service_kit.settings import LogSettings

LEVEL_VARIABLE, FORM_VARIABLE = "TURNWISE_LOG_LEVEL", "TURNWISE_LOG_FORMAT"


@pytest.fixture
def written(capsys):
    """What came out on stderr; afterwards nothing writes to a stream that pytest has closed."""
    yield lambda: capsys.readouterr().err
    structlog.reset_defaults()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_has_its_ids_and_a_traceback_no_local_variables(form, written):
    configure_logs_from({FORM_VARIABLE: form})
    secret = "zebra-" + "quagga"
    with structlog.contextvars.bound_contextvars(request_id="mine-1"):
        try:
            raise ValueError("broken")
        except ValueError:
            structlog.get_logger("trainer").exception("failed", job="j1")
    line = written()
    assert "ValueError: broken" in line and "j1" in line and "mine-1" in line and secret not in line
    if form == "json":
        found = json.loads(line)
        assert (found["event"], found["level"], found["job"]) == ("failed", "error", "j1")


def test_what_is_below_the_level_is_not_written(written):
    log = structlog.get_logger("trainer")
    for environ, told in (({}, ["info"]), ({LEVEL_VARIABLE: "debug"}, ["debug", "info"])):
        configure_logs_from({FORM_VARIABLE: "json", **environ})
        log.debug("seen")
        log.info("seen")
        assert [json.loads(line)["level"] for line in written().splitlines()] == told
    configure_logs_from({LEVEL_VARIABLE: "warning"})
    log.info("seen")
    assert written() == ""


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        (
            LEVEL_VARIABLE,
            "warn",
            "TURNWISE_LOG_LEVEL is 'warn'. Did you mean 'warning'? Known: critical, debug",
        ),
        (FORM_VARIABLE, "jsn", "TURNWISE_LOG_FORMAT is 'jsn'. Did you mean 'json'? Known: json, text"),
    ],
)
def test_a_value_that_is_none_names_its_variable_and_what_is_known(variable, value, told):
    with pytest.raises(SettingsError) as refused:
        configure_logs_from({variable: value})
    assert str(refused.value).startswith(told)


def test_every_value_that_is_known_can_be_used(written):
    for variable, name in ((LEVEL_VARIABLE, "log_level"), (FORM_VARIABLE, "log_format")):
        for value in get_args(LogSettings.model_fields[name].annotation):
            configure_logs_from({variable: value})
            structlog.get_logger("trainer").critical("seen")
            assert "seen" in written(), (variable, value)
