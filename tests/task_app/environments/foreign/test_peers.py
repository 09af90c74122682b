"""Servers of others as env_name: OpenEnv and MCP, made with their own packages, and one of our own."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from task_app.environments.foreign.mcp_servers import McpServer
from task_app.protocols import ConversationalEnvironment, Environment, RestorableEnvironment, ToolRequest
from tests.task_app.environments.foreign.contracts import PROMISES, environment, keeps
from tests.task_app.environments.foreign.processes import HERE, served

# A Python that has openenv-core, whose pins differ from ours.
OPENENV_PYTHON = os.environ.get("TURNWISE_TEST_OPENENV_PYTHON")
MODES = ["fresh", "conversation"]


@pytest.fixture(scope="module", params=["echo", "guess"])
def openenv(request) -> Iterator[str]:
    if OPENENV_PYTHON is None:
        pytest.skip("no `openenv-core`; TURNWISE_TEST_OPENENV_PYTHON names a Python that has it")
    with served(OPENENV_PYTHON, "openenv_servers.py", request.param) as url:
        yield f"openenv:{url}"


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("prompts", MODES)
def test_an_openenv_server_keeps_the_contract(openenv, promise, prompts):
    keeps(promise, openenv, {"prompts": prompts})


@pytest.fixture(scope="module", params=["http", "by_hand"])
def mcp(request) -> Iterator[str]:
    pytest.importorskip("mcp", reason="the package `mcp` is not installed")
    if request.param != "http":
        yield f"mcp:{request.param}"
        return
    with served(sys.executable, "mcp_server.py") as url:
        yield f"mcp:{url}/mcp"


GUESS = {"reset_tool": "start", "task": "Find the number."}
SERVERS = {
    "guess": McpServer(command=sys.executable, args=(str(HERE / "mcp_server.py"),)),
    "by_hand": McpServer(command=sys.executable, args=(str(HERE / "mcp_game.py"),)),
}


def build_game(mcp: str) -> Environment:
    return environment(mcp, GUESS, mcp_servers=SERVERS)


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("mcp", ["http"], indirect=True)
@pytest.mark.parametrize("prompts", MODES)
def test_an_mcp_server_keeps_the_contract(mcp, promise, prompts):
    keeps(promise, mcp, {**GUESS, "prompts": prompts}, mcp_servers=SERVERS)


@pytest.mark.parametrize("promise", PROMISES)
def test_an_mcp_server_of_a_process_keeps_the_contract(promise):
    keeps(promise, "mcp:by_hand", GUESS, mcp_servers=SERVERS)


def guess(*numbers):
    return tuple(ToolRequest("guess", {"number": number}) for number in numbers)


# The package's own server over stdin and stdout takes three seconds to import: `make test-foreign` plays it.
@pytest.mark.parametrize("mcp", ["http", "guess" if OPENENV_PYTHON else "by_hand"], indirect=True)
def test_the_reward_of_a_call_is_what_the_tools_result_says(mcp):
    game = build_game(mcp)
    assert isinstance(game, ConversationalEnvironment) and not isinstance(game, RestorableEnvironment)
    game.reset(3)  # random.Random(3).randint(0, 9) == 3
    assert game.opening()[-1].content == "Find the number.\n\na number from 0 to 9"
    assert [tool.function.name for tool in game.tools()] == ["guess"]
    first = game.step(guess(9, -1, 1))
    assert first.env_rewards == (-0.1, 0.0, -0.1)
    assert first.executed_actions == ("guess", "noop", "guess")
    assert first.results[1].startswith("error: ") and "there is no such number" in first.invalid_reason
    last = game.step(guess(3, 4))
    assert (last.env_rewards, last.terminated) == ((1.0,), True)
    assert last.results[1] == "error: not carried out: the episode had ended before"
    assert game.outcome_reward() == pytest.approx(0.8)
    game.close()


def test_two_episodes_of_one_server_do_not_touch(mcp):
    one, other = build_game(mcp), build_game(mcp)
    one.reset(3)
    other.reset(0)  # 6
    assert [one.step(guess(3)).terminated, other.step(guess(3)).terminated] == [True, False]
    one.reset(0)
    assert one.step(guess(6)).terminated and other.step(guess(6)).terminated


def test_closing_returns_what_is_held_and_threads_too(mcp):
    before = threading.active_count()
    game = build_game(mcp)
    game.reset(3)
    game.close()
    game.close()
    assert threading.active_count() == before
    assert game.reset(3).text == "Find the number.\n\na number from 0 to 9"
    game.close()
