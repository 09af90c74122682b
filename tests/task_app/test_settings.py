"""One table of settings, read from the environment, with bounds; and what a line of the log names."""

import json
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from service_kit.errors import SettingsError
from service_kit.logs import configure_logs
from service_kit.settings import read_settings
from task_app.environments.foreign.child import START_S
from task_app.settings import Settings
from tests.task_app.counting import KEY, rollout, running_app
from tests.task_app.rollout_client import play


def test_a_slow_start_of_a_foreign_environment_is_not_counted_as_hung():
    settings = Settings()
    assert settings.plugin_stuck_after_s > START_S + settings.environment_deadline_s


def test_keys_come_from_their_published_names_without_blanks_and_repetitions_or_from_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    for environ, keys in (
        ({"PATH": "/bin"}, []),
        ({"ENVIRONMENT_API_KEY": " one ", "ENVIRONMENT_API_KEY_ALIASES": "a, ,one,b"}, ["one", "a", "b"]),
        ({"ENVIRONMENT_API_KEY_FILE": str(file)}, ["from-a-file"]),
    ):
        settings = read_settings(Settings, environ)
        assert [key.get_secret_value() for key in settings.api_keys] == keys


@pytest.mark.parametrize("content", [None, "\n"])
def test_a_key_file_that_was_named_must_hold_a_key(tmp_path, content):
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=r"ENVIRONMENT_API_KEY_FILE names .*key'"):
        read_settings(Settings, {"ENVIRONMENT_API_KEY_FILE": str(file)})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("TURNWISE_MAX_SESSIONS", value) for value in ("0", "many")),
        *(("TURNWISE_MAX_WAIT_S", value) for value in ("-1", "nan")),
        ("TURNWISE_SESSION_IDLE_S", "inf"),
        ("TURNWISE_ALLOWED_INFERENCE_HOSTS", "http://gpu-7"),
        ("TURNWISE_MAX_SESSION", "7"),
        ("TURNWISE_ALLOWED_INFERENCE_HOST", "gpu-7"),
        ("TURNWISE_LOG_LEVEL", "loud"),
        ("TURNWISE_INFERENCE_URL", "vllm:8000"),
        ("TURNWISE_INFERENCE_URL", "http://me:secret@vllm:8000"),
    ],
)
def test_a_bad_value_names_its_variable(variable, value):
    with pytest.raises(SettingsError, match=variable):
        read_settings(Settings, {variable: value, "ENVIRONMENT_API_KEY": "secret"})


def test_mcp_servers_come_from_a_file_in_the_form_of_other_clients(tmp_path):
    file = tmp_path / "mcp.json"
    file.write_text(
        '{"mcpServers": {"files": {"command": "npx", "args": ["-y", "files"], "env": {"KEY": "secret"}},'
        ' "far": {"disabled": true, "url": "https://far.example/mcp", "headers": {"X-Key": "secret"}}},'
        ' "inputs": []}'
    )
    settings = read_settings(Settings, {"TURNWISE_MCP_SERVERS": f" {file}"})
    assert settings.mcp_servers["files"].args == ("-y", "files")
    far = settings.mcp_servers["far"]
    assert (far.command, far.url) == (None, "https://far.example/mcp")
    assert read_settings(Settings, {"TURNWISE_MCP_SERVERS": ""}).mcp_servers == {}
    assert "secret" not in repr(settings) + json.dumps(settings.limits())


def write_servers(server: str) -> str:
    return f'{{"mcpServers": {{"far": {server}}}}}'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("{", "EOF while parsing"),
        ("{}", "mcpServers: Field required; the file has the form"),
        (write_servers('{"command": "npx", "args": "files"}'), "mcpServers.far.args: "),
        (write_servers('{"url": "far:9000"}'), "far.url: "),
        (write_servers('{"url": "https://secret@a:secret/"}'), "far.url: "),
        (write_servers('{"url": "https://a/secret\\n"}'), "far.url: "),
        (write_servers('{"headers": {"Key": "secret\\n"}}'), "far.headers: "),
        (write_servers('{"headers": {"Key: secret": ""}}'), "far.headers: "),
    ],
)
def test_a_file_of_mcp_servers_that_cannot_be_used_is_told_at_the_start(tmp_path, text, sentence):
    file = tmp_path / "mcp.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match="TURNWISE_MCP_SERVERS") as refused:
        read_settings(Settings, {"TURNWISE_MCP_SERVERS": str(file)})
    assert sentence in refused.value.detail and "secret" not in refused.value.detail


def test_the_option_of_a_list_adds_to_its_variable():
    environ = {"TURNWISE_ALLOWED_INFERENCE_HOSTS": "a,b:1"}

    def added(*hosts: str) -> tuple[str, ...]:
        return read_settings(Settings, environ, allowed_inference_hosts=list(hosts)).allowed_inference_hosts

    assert added("c:2", "a", "[::2]:3") == ("a", "b:1", "c:2", "[::2]:3")
    for odd in ("[::1]evil.example", "[::1", "::1]", "a:b", "a b", "a:1:2x", "user@a", "a\n"):
        with pytest.raises(SettingsError, match=": expected host or host:port"):
            added(odd)
    with pytest.raises(SettingsError, match=r"--allow-inference-host or TURNWISE_\w+ is 'http://c/'"):
        added("http://c/")


def test_an_option_wins_over_its_variable_and_what_only_the_command_line_names_has_none():
    environ = {"TURNWISE_STATE_DIR": "there", "TURNWISE_MAX_SESSIONS": "", "TURNWISE_MAX_WAIT_S": "1.5"}
    read = read_settings(Settings, environ)
    assert (read.state_dir, read.max_wait_s) == (Path("there"), 1.5)
    assert read_settings(Settings, environ, state_dir=Path("here")).state_dir == Path("here")
    assert read.max_sessions == Settings().max_sessions, "an empty variable is none"
    assert read_settings(Settings, {"TURNWISE_ALLOWED_INFERENCE_HOSTS": ""}).allowed_inference_hosts == ()
    environ = {"TURNWISE_PORT": "1", "TURNWISE_REPLICAS": "2", "TURNWISE_API_KEYS": "k"}
    assert read_settings(Settings, environ) == Settings()


BOOM = [{"tool": "add", "args": {"names": ["boom"]}}]


@pytest.fixture
def logs():
    """What is logged, with what is bound to it."""
    configure_logs("debug")
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as found:
        yield found


async def test_a_request_has_an_id_in_its_answer_and_in_every_line(logs, client):
    env_id = (await client.post("/env/create", json={"env_name": "counting"})).json()["env_id"]
    logs.clear()
    step = {"env_id": env_id, "tool_calls": BOOM}
    answer = await client.post("/env/step", json=step, headers={"X-Request-ID": "mine-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (424, "mine-1")
    assert [line["event"] for line in logs] == ["boundary", "request"]
    assert all((line["request_id"], line["env_id"]) == ("mine-1", env_id) for line in logs)
    assert (logs[1]["route"], logs[1]["status"]) == ("/env/step", 424)


async def test_a_rollout_logs_its_own_ids_and_not_those_of_the_request_that_started_it(logs):
    broken = rollout("b", policy={"policy_name": "planned", "config": {"names": ["boom"]}})
    async with running_app(max_concurrent_rollouts=1) as client:
        await play(client, rollout("a"), broken)
    told = {line["event"]: line for line in logs if "rollout_id" in line}
    assert (told["rollout_finished"]["run_id"], told["rollout_finished"]["rollout_id"]) == ("r", "a")
    assert (told["boundary"]["rollout_id"], told["rollout_failed"]["rollout_id"]) == ("b", "b")
    assert not [line for line in told.values() if "request_id" in line]


IDS = ["", "two words", "x" * 129, "schlüssel", f"trace-{KEY}", KEY, "a\tb", '"quoted"']


@pytest.mark.parametrize(("sent", "presented"), [*((one, KEY) for one in IDS), (KEY, "")])
async def test_an_id_that_is_no_id_or_holds_a_key_is_replaced(logs, client, sent, presented):
    headers = {"X-Request-ID": sent.encode(), "X-API-Key": presented}
    answer = await client.get("/health", headers=headers)
    found = answer.headers["x-request-id"]
    assert found != sent
    assert len(found) == 16
    assert [line["request_id"] for line in logs] == [found]
    assert KEY not in str(answer.headers) + str(logs)


async def test_ids_of_requests_differ_and_nothing_stays_bound(client):
    answers = [await client.get("/health") for _ in range(20)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 20
    structlog.contextvars.clear_contextvars()
