"""A client that `openapi-python-client` generates from /openapi.json, over HTTP with a task app that runs."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest

from task_app.app import create_app
from task_app.plugins import InteractionEntry, default_plug_boards
from task_app.settings import Settings
from tests.task_app.counting import KEY
from tests.task_app.interactions.users import Noted
from tests.task_app.served import served_app

HAS_GENERATOR = find_spec("openapi_python_client") is not None
pytestmark = pytest.mark.skipif(not HAS_GENERATOR, reason="openapi-python-client is not installed")
PAGE = (Path(__file__).parents[2] / "docs/http.md").read_text(encoding="utf-8")
PACKAGE = "turnwise_task_app_client"  # by the title of the document


def generate(document: dict[str, Any], folder: Path) -> None:
    """Write the package; a part of the document that the generator does not understand is an error."""
    (folder / "openapi.json").write_text(json.dumps(document))
    (config,) = re.findall(r"```yaml\n(content_type_overrides.*?)```", PAGE, re.S)
    (folder / "config.yaml").write_text(f"{config}post_hooks: []\n")
    words = f"generate --path openapi.json --config config.yaml --output-path {PACKAGE} --meta none"
    subprocess.run(
        [sys.executable, "-m", "openapi_python_client", *words.split(), "--fail-on-warning"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """The modules of the generated operations, by the operation's name."""
    folder = tmp_path_factory.mktemp("generated")
    generate(create_app(Settings(api_keys=(KEY,))).openapi(), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        files = sorted((folder / PACKAGE / "api").glob("*/[!_]*.py"))
        yield {file.stem: import_module(f"{PACKAGE}.api.{file.parent.name}.{file.stem}") for file in files}


@dataclass
class Generated:
    """The generated client of a service."""

    modules: dict[str, Any]
    client: Any

    async def ask(self, operation: str, *path: str, body: Any = None, **query: Any) -> Any:
        """The parsed reply."""
        call = self.modules[operation].asyncio_detailed
        if body is not None:
            query["body"] = signature(call).parameters["body"].annotation.from_dict(body)
        return (await call(*path, client=self.client, **query)).parsed


@pytest.fixture
async def task_app(modules):
    boards = replace(default_plug_boards(), interactions={"noted": InteractionEntry("noted", Noted, {})})
    async with served_app(boards) as (http, _):
        client = import_module(PACKAGE).AuthenticatedClient(
            str(http.base_url), KEY, raise_on_unexpected_status=True, timeout=httpx.Timeout(20.0)
        )
        async with client:
            yield Generated(modules, client)


def test_no_operation_of_the_generated_client_returns_any(modules):
    assert len(modules) > 50
    replies = {
        name: get_args(get_type_hints(module._parse_response)["return"]) for name, module in modules.items()
    }
    # The 304 of a page has no body.
    assert {name for name, kinds in replies.items() if not kinds or Any in kinds} == {"show_env_page"}


async def test_the_lines_of_the_page_run(task_app, capsys):
    (lines,) = re.findall(r"```py\n(.*?)```", PAGE, re.S)
    lines = lines.replace("http://localhost:8001", str(task_app.client.get_async_httpx_client().base_url))
    await asyncio.to_thread(exec, lines, {"key": KEY})
    assert "CRAFTER GAME STATE" in capsys.readouterr().out


async def test_an_environment_and_a_policy_are_played_by_their_types(task_app):
    env = await task_app.ask("create_env", body={"env_name": "crafter", "seed": 17})
    assert (env.info.seed, env.info.tools[0].function.name) == (17, "interact_many")
    calls = [{"tool": "interact_many", "args": {"actions": ["move_right"] * 3 + ["do"]}}]
    step = await task_app.ask("step_env", body={"env_id": env.env_id, "tool_calls": calls})
    assert (step.env_rewards, step.info.achievements_added) == ([0.0, 0.0, 0.0, 1.0], ["collect_wood"])
    steps = [{"env_id": env_id, "tool_calls": calls} for env_id in (env.env_id, "env_of_nobody")]
    taken, refused = (await task_app.ask("step_many", body={"steps": steps})).results
    assert (taken.info.turn, refused.problem.code) == (2, "unknown_id")
    snapshot = await task_app.ask("snapshot_env_by_id", env.env_id)
    copy = await task_app.ask("restore_env", body={"snapshot": snapshot.snapshot})
    assert (snapshot.info.turn, copy.step_idx, copy.observation.text) == (2, 8, taken.observation.text)
    body = {"policy_name": "random", "config": {"seed": 3}, "bound_env_id": copy.env_id}
    policy = await task_app.ask("create_policy", body=body)
    choice = await task_app.ask("step_policy", body={"policy_id": policy.policy_id})
    assert choice.meta.policy_name == "random"
    assert choice.tool_calls[0].function.name == "interact_many"
    assert (await task_app.ask("terminate_policy_by_id", policy.policy_id)).ok
    picture = await task_app.ask("draw_env", copy.env_id)
    assert picture.payload.read(4) == b"\x89PNG"
    unknown = await task_app.ask("reset_env", body={"env_id": "env_of_nobody"})
    assert (unknown.status, unknown.where) == (404, "env_id")


async def test_rollouts_come_with_typed_trajectories(task_app):
    one = {
        "rollout_id": "a", "run_id": "run", "start": {"seed": 3}, "env": {"env_name": "crafter"},
        "policy": {"policy_name": "random"}, "limits": {"max_decisions": 2},
    }  # fmt: skip
    assert (await task_app.ask("accept_rollouts", body={"rollouts": [one]})).accepted == ["a"]
    (rollout,) = (await task_app.ask("poll_rollouts", run_id="run", wait_s=20.0)).rollouts
    assert [step.turn for step in rollout.trajectory.steps] == [1, 2]
    assert rollout.trajectory.stop_reason == "max_decisions"
    run = await task_app.ask("show_run", "run")
    assert (run.status, run.rollouts.finished, run.started_at.utcoffset().seconds) == ("completed", 1, 0)
    ops = ["agent", "env"]
    body = {"run_id": "old", "env": {"env_name": "crafter", "seed": 3}, "policy": {"policy_name": "random"}}
    legacy = await task_app.ask("play_rollout", body=body | {"ops": ops})
    assert (legacy.metrics.num_steps, legacy.trajectories[0].steps[0].info.meta.turn_index) == (1, 1)


async def test_a_capture_answers_in_the_types_of_its_dialects(task_app):
    capture = await task_app.ask("open_capture", body={"policy": {"policy_name": "random"}})
    messages = [{"role": "user", "content": "Begin."}]
    tools = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}]
    body = {"model": "any", "messages": messages, "max_tokens": 9}
    chat = await task_app.ask("create_chat_completion", capture.capture_id, body=body | {"tools": tools})
    assert chat.choices[0].message.tool_calls[0].function.name == "go"
    response = await task_app.ask(
        "create_response", capture.capture_id, body={"model": "any", "input": "Go."}
    )
    message = await task_app.ask("create_message", capture.capture_id, body=body)
    assert response.output[0].content[0].text == message.content[0].text
    refused = await task_app.ask("create_message", capture.capture_id, body={"model": "any"})
    assert (refused.type_, refused.error.type_) == ("error", "invalid_request_error")
    await task_app.ask("reward_capture", capture.capture_id, body={"reward": 0.5, "turn": 1})
    ended = await task_app.ask("end_capture", capture.capture_id)
    assert (ended.calls, ended.trajectory.outcome_reward) == (3, 0.5)


async def test_an_interaction_and_the_service_itself(task_app):
    started = await task_app.ask("start_interaction", body={"name": "noted"})
    messages = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "Two."}]
    body = {"interaction_id": started.interaction_id, "messages": messages}
    assert (await task_app.ask("respond_interaction", body=body)).turn == 1
    assert (await task_app.ask("finalize_interaction", body={"interaction_id": started.interaction_id})).ok
    assert "crafter" in (await task_app.ask("show_info")).capabilities.environments
    tasks = await task_app.ask("show_task_info", seed=[3, 4], env_name="crafter")
    assert [task.observation.seed for task in tasks] == [3, 4]
    assert "turnwise_sessions" in await task_app.ask("show_metrics")
