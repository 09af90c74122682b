"""Libraries as env_name, in processes of another Python: reasoning_gym, textarena and verifiers; and servers
of OpenEnv and MCP, made with their own packages, and one of our own.

`standins` has small modules under the names of the first two; the packages themselves, whose pins differ from
ours, are played where TURNWISE_TEST_..._PYTHON names a Python that has one (`make test-foreign`).
"""

import os
import resource
import sys
import threading
from collections.abc import Iterator

import pytest

from shared_schemas.prefixes import PREFIXES
from task_app.environments.foreign.kinds import FOREIGN
from task_app.environments.foreign.mcp_servers import McpServer
from task_app.environments.foreign.peer import ForeignDeadline, ForeignFailed
from task_app.errors import EpisodeOver, InvalidRequest
from task_app.protocols import ConversationalEnvironment, Environment, RestorableEnvironment, ToolRequest
from tests.task_app.environments.foreign.contracts import PROMISES, environment, keeps
from tests.task_app.environments.foreign.processes import HERE, served
from trainer_backend.terminal.environment_jobs import JOBS

NAME = "verifiers:turnwise_sums"


def script(folder, text):
    """An executable that stands for a Python."""
    file = folder / "python"
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def with_path(folder, python, modules):
    """A Python that imports modules of a folder of the tests too."""
    return script(folder, f'#!/bin/sh\nPYTHONPATH={HERE / modules} exec {python} "$@"\n')


def real_python(library):
    variable = f"TURNWISE_TEST_{library.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"no `{library}`; {variable} names a Python that has it")
    return python


@pytest.fixture(scope="module")
def standins(tmp_path_factory):
    python = with_path(tmp_path_factory.mktemp("python"), sys.executable, "standins")
    return {"reasoning_gym_python": python, "textarena_python": python}


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    """What reaches our tasksets."""
    python = with_path(tmp_path_factory.mktemp("verifiers"), real_python("verifiers"), "tasksets")
    tasksets = ("turnwise_guess", "turnwise_shop", "turnwise_sums")
    return {"verifiers_python": python, "verifiers_modules": tasksets, "environment_deadline_s": 60.0}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_world_of_a_library_keeps_the_contract(standins, promise):
    keeps(promise, "textarena:Guess-v0", words="5", **standins)


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(
    ("name", "words"), [("textarena:Bandit-v0", "[red]"), ("reasoning_gym:chain_sum", "7")]
)
def test_the_packages_themselves_keep_the_contract(name, words, promise):
    library = name.partition(":")[0]
    keeps(
        promise, name, words=words, **{f"{library}_python": real_python(library)}, environment_deadline_s=60.0
    )


def test_a_game_is_a_conversation_whose_end_pays(standins):
    game = environment("textarena:Guess-v0", {"game": {"tries": 2}}, **standins)
    game.reset(3)  # random.Random(3).randrange(10) == 3
    assert [message.content for message in game.opening()] == ["Guess a number below 10."]
    assert game.answer("4").result == "wrong"
    refused = game.answer("four")
    assert (refused.env_rewards, refused.executed_actions) == ((0.0,), ("noop",))
    assert refused.invalid_reason == "'four' is no number."
    last = game.answer("3")
    assert (last.result, last.env_rewards, last.terminated) == ("right\nover", (1.0,), True)
    game.reset(3)
    assert not game.answer("four").terminated
    assert game.answer("five").env_rewards == (-0.5,)
    game.close()


def test_a_question_is_scored_by_the_text_in_its_answer_tags(standins):
    sums = environment("reasoning_gym:sums", {"dataset": {"largest": 99}}, **standins)
    sums.reset(1)  # random.Random(1).randint(0, 99) == 17, then 72
    assert sums.opening()[-1].content == "17 + 72 ="
    outcome = sums.answer("17 and 72 make <answer>89</answer>")
    assert (outcome.env_rewards, outcome.terminated) == ((1.0,), True)
    sums.reset(1)
    assert sums.answer("90").env_rewards == (0.25,)
    sums.reset(1)
    unread = sums.answer("I do not know")  # the scorer raises
    assert (unread.env_rewards, unread.terminated) == ((0.0,), True)
    sums.close()


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("textarena:Duel-v0", {}, "does not start for one player (AssertionError: The number of players has"),
        ("textarena:Gues-v0", {}, "is none of the 2 games of textarena. Did you mean 'Guess-v0'"),
        ("reasoning_gym:sum", {}, "is none of the 1 data sets of reasoning_gym. Did you mean 'sums'?"),
        ("reasoning_gym:sums", {"dataset": {"smallest": 1}}, "is no config of 'sums': TypeError"),
    ],
)
def test_what_a_library_cannot_play_fails_with_its_reason(standins, name, config, sentence):
    with pytest.raises(ForeignFailed) as failed:
        environment(name, config, **standins).reset(0)
    assert sentence in failed.value.detail


def test_the_prefixes_that_errors_and_jobs_know_are_those_that_play():
    assert FOREIGN.keys() == PREFIXES.keys()
    assert {f"{name}:" for name in PREFIXES} <= JOBS.keys()


def test_an_unknown_prefix_is_told_all_that_are_known():
    with pytest.raises(InvalidRequest) as refused:
        environment("reasoning-gym:sums")
    assert "Did you mean 'reasoning_gym:'?" in refused.value.detail
    assert "textarena:ID, verifiers:MODULE" in str(refused.value.hint)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_taskset_keeps_the_contract(verifiers, promise):
    keeps(promise, NAME, **verifiers)


def test_the_reward_of_the_answer_is_the_weighted_sum_of_the_tasks_rewards(verifiers):
    sums = environment(NAME, {"taskset": {"largest": 7}}, **verifiers)
    sums.reset(8 + 2)  # the third of eight tasks
    assert [message.content for message in sums.opening()] == ["Add.", "2 + 5 ="]
    outcome = sums.answer("7")
    assert (outcome.env_rewards, outcome.terminated) == ((1.25,), True)
    with pytest.raises(EpisodeOver):
        sums.answer("8")
    sums.close()


def test_an_env_of_verifiers_answers_as_the_user_until_it_ends(verifiers):
    game = environment("verifiers:turnwise_guess", **verifiers)
    game.reset(1_007)  # the worlds of a taskset without an end are 1,000
    first = game.answer("3")
    assert (first.result, first.env_rewards, first.terminated) == ("wrong", (0.0,), False)
    last = game.answer("7")
    assert (last.env_rewards, last.terminated) == ((0.5,), True)
    game.close()
    short = environment("verifiers:turnwise_guess", {"max_turns": 1}, **verifiers)
    short.reset(7)
    cut = short.answer("3")
    assert (cut.env_rewards, cut.terminated, cut.truncated) == ((1.0,), False, True)
    short.close()


def test_tools_of_a_taskset_are_called_at_its_server(verifiers):
    shop = environment("verifiers:turnwise_shop", **verifiers)
    assert sorted(tool.function.name for tool in shop.tools()) == ["buy", "price"]
    shop.reset(1)
    calls = [ToolRequest(name, {"item": "screw"}) for name in ("price", "steal", "buy")]
    outcome = shop.step(calls)
    assert outcome.executed_actions == ("price", "noop", "buy") and not outcome.terminated
    assert (outcome.results[0], outcome.results[2]) == ("screw costs 5", "bought 1")
    last = shop.answer("There you are.")
    assert (last.env_rewards, last.terminated) == ((1.0,), True)
    shop.close()


def test_a_python_without_verifiers_is_told_as_such():
    sums = environment(NAME, verifiers_modules=("turnwise_sums",))
    with pytest.raises(
        ForeignFailed, match=r"has no verifiers 0\.4 .*: pip install verifiers; .* TURNWISE_VERIFIERS_PYTHON"
    ):
        sums.reset(0)


def test_a_request_imports_nothing_that_the_operator_did_not_list():
    with pytest.raises(InvalidRequest, match="taskset 'turnwise_sums'"):
        environment(NAME)


def test_a_process_that_hangs_has_no_longer_than_any_other_server(tmp_path):
    stub = script(tmp_path, "#!/bin/sh\necho '{\"ready\": []}'; while read line; do :; done\n")
    reach = {"verifiers_python": stub, "verifiers_modules": ("turnwise_sums",)}
    with pytest.raises(ForeignDeadline, match="did not answer within 2 s"):
        environment(NAME, environment_deadline_s=2.0, **reach).reset(0)


def test_a_task_app_with_many_connections_can_play_too(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2_048, hard), hard))
    held = []
    try:
        while not held or held[-1] < 1_024:
            held.append(os.dup(0))
        lines = ("echo '{\"ready\": []}'", "read line", 'echo \'{"prompt": "2 + 2"}\'', "read line")
        stub = script(tmp_path, "\n".join(("#!/bin/sh", *lines, "")))
        sums = environment(NAME, verifiers_python=stub, verifiers_modules=("turnwise_sums",))
        assert sums.reset(0).text == "2 + 2"
        sums.close()
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    "by_hand": McpServer(command=sys.executable, args=(str(HERE / "mcp_child.py"), "game")),
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
