"""No reply, record or log holds a part of an inference key, whatever the server answers."""

import pytest
from structlog.testing import capture_logs

from tests.task_app.counting import rollout, running_app
from tests.task_app.fake_inference import fake_inference, status
from tests.task_app.rollout_client import accept, wait_for_all

KEY = "sk-a-very-secret-key-0123456789"


@pytest.fixture
def logged():
    """The events that the service logs, retries included."""
    with capture_logs() as events:
        yield events


async def play_failing(*answers):
    async with fake_inference(*answers) as fake, running_app() as client:
        config = {"inference_url": fake.url, "model": "m", "max_attempts": 2}
        policy = {"policy_name": "openai", "config": config, "inference_key": KEY}
        await accept(client, rollout("a", policy=policy))
        return (await wait_for_all(client, 1))["a"].failure


@pytest.mark.parametrize("code", [401, 403])
async def test_of_a_refused_key_only_status_and_code_are_kept(code, logged):
    sentence = f"Incorrect API key provided: {KEY[:8]}*****{KEY[-4:]}, that is {KEY}."
    error = {"error": {"code": "invalid_api_key", "message": sentence}}
    failure = await play_failing(status(code, error))
    assert failure.code == "inference_refused"
    assert failure.detail == f"the inference server refused: status {code} invalid_api_key"
    written = str(logged)
    assert "invalid_api_key" in written
    assert not any(part in failure.detail + written for part in (KEY, KEY[:8], KEY[-4:]))


@pytest.mark.parametrize("code", [400, 503])
async def test_a_repeated_key_is_replaced_everywhere_else(code, logged):
    # Near the cut at 300 characters: cut before replacing, half of the key would stay.
    error = {"error": {"code": f"bad {KEY}", "message": f"you sent {KEY} {'x' * 250} {KEY} again"}}
    failure = await play_failing(status(code, error))
    assert "bad [key] you sent [key]" in failure.detail
    written = str(logged)
    assert "rollout_failed" in written
    assert KEY[:8] not in failure.detail + written


@pytest.mark.parametrize("key", ["k" * 501, "clé", "two\nlines", "nul\0"])
async def test_a_key_that_fits_no_header_is_refused_and_not_shown(key):
    policy = {"policy_name": "planned", "inference_key": key}
    async with running_app() as client:
        answers = {
            "rollouts.0.policy.inference_key": await accept(client, rollout("a", policy=policy)),
            "inference_key": await client.post("/policy/create", json=policy),
        }
    for where, answer in answers.items():
        # U+0000 may stand nowhere in a body, and is refused before anybody reads what it belongs to.
        assert (answer.status_code, answer.json()["where"]) == (422, "body" if "\0" in key else where)
        assert key not in answer.json()["detail"]
