"""Reward functions in real child processes, and rollouts over HTTP that are judged by them."""

import asyncio
import gc
import itertools
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from task_app.errors import CriticalError, RewardFunctionFailed
from task_app.operator_plugins import with_plugins
from task_app.plugins import default_plug_boards
from task_app.reward_functions.pool import RewardPool
from task_app.settings import Settings
from tests.processes import runs, wait_until
from tests.task_app.counting import boards, rollout, running_app
from tests.task_app.rollout_client import accept, wait_for_all

FILE = Path(__file__).with_name("judges.py")


@asynccontextmanager
async def pool(name, **settings):
    plugin = with_plugins(default_plug_boards(), [FILE]).reward_functions[name]
    made = RewardPool(name, plugin, Settings(max_reward_processes=1, **settings))
    try:
        yield made
    finally:
        await made.close()
        gc.collect()  # a pipe or a process that was left open warns here, and not in some later test


def episode(truth=None, name="r"):
    message = {"role": "assistant", "content": "4"}
    return {
        "messages": [message],
        "ground_truth": truth,
        "environment_outcome_reward": 2.0,
        "rollout_id": name,
    }


async def test_one_process_serves_call_after_call_also_after_an_error():
    async with pool("truth") as made:
        first = await made.judge(episode({"answer": 4}))
        with pytest.raises(RewardFunctionFailed, match="raised TypeError"):
            await made.judge(episode())
        second = await made.judge(episode({"answer": 1}))
        assert (first.score, second.score) == (4.0, 1.0)
        assert first.reason == second.reason, "the process's id"


async def test_prints_go_to_the_log_up_to_a_bound_and_not_into_the_exchange():
    with capture_logs() as logs:
        async with pool("chatty") as made:
            assert (await made.judge(episode())).score == 1.0
            assert (await made.judge(episode("flood"))).score == 1.0
    printed = [entry["text"] for entry in logs if entry["event"] == "reward_function_printed"]
    for text in ('{"results": [{"score": 5}]}', "to stderr", "to the descriptor", "from a child"):
        assert text in "\n".join(printed)
    # 2000 lines of 1001 bytes
    logged = sum(len(text) + 1 for text in printed)
    left_out = sum(entry["bytes"] for entry in logs if entry["event"].endswith("left_out"))
    assert 0 < logged <= 65_536 + 2_000
    assert left_out > 1_900_000


async def test_run_by_hand_it_ends_alone_and_not_with_the_shell_that_called_it():
    by_hand = f": | {sys.executable} -m task_app.reward_functions.child {FILE} fair; echo on"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shell = subprocess.run(
        ["sh", "-c", by_hand], env=environ, start_new_session=True, capture_output=True, text=True
    )
    assert (shell.returncode, shell.stdout) == (0, "{}\non\n")


@pytest.mark.parametrize("name", ["backtracks", "closes"])
async def test_what_hangs_is_killed_at_the_deadline_and_the_next_call_has_a_new_process(name):
    with capture_logs() as logs:
        async with pool(name, reward_deadline_s=0.3) as made:
            for _ in range(2):
                with pytest.raises(RewardFunctionFailed) as caught:
                    await made.judge(episode())
                assert caught.value.code == "reward_function_deadline"
                assert f"reward function '{name}' did not answer within 0.3 s" in caught.value.detail
    told = "".join(entry.get("text", "") for entry in logs)
    assert ("judges.py" in told) == (name == "backtracks"), "the log says where it was"


async def test_an_answer_that_is_no_reward_is_a_failure_that_says_why():
    async with pool("no_reward") as made:
        for kind, told in (
            ("raises", "reward function 'no_reward' raised KeyError: 'answer'"),
            ("number", "reward function 'no_reward' returned the float 0.5"),
            ("nan", "made no EvaluateResult: score: a reward is nan; it must be a finite number"),
            ("leaves", "reward function 'no_reward' raised SystemExit: 3 (judges.py:"),
            ("scribbles", "reward function 'no_reward' wrote into the exchange of its process"),
            ("huge", "reward function 'no_reward' answered more than 1048576 bytes"),
        ):
            with pytest.raises(RewardFunctionFailed) as caught:
                await made.judge(episode(kind))
            assert told in caught.value.detail
            assert caught.value.code == "reward_function_failed"


async def test_a_file_that_cannot_be_imported_in_the_child_is_told(tmp_path):
    file = tmp_path / "a_file_that_breaks_later.py"
    file.write_text(FILE.read_text())
    plugin = with_plugins(default_plug_boards(), [file]).reward_functions["fair"]
    file.write_text("1 / 0")
    made = RewardPool("fair", plugin, Settings())
    with pytest.raises(RewardFunctionFailed, match=r"raised ZeroDivisionError"):
        await made.judge(episode())
    await made.close()


OF_OTHERS = {"ENVIRONMENT_API_KEY", "ENVIRONMENT_API_KEY_ALIASES", "TRAINER_API_KEY", "OTHER"}


async def test_no_key_reaches_the_process_but_what_the_operator_lists(monkeypatch):
    for name in {*OF_OTHERS, "JUDGE_KEY"}:
        monkeypatch.setenv(name, "secret")
    async with pool("variables", reward_variables=("JUDGE_KEY",)) as made:
        found = set((await made.judge(episode())).reason.split())
    assert "JUDGE_KEY" in found
    assert not found & OF_OTHERS
    with pytest.raises(ValueError, match="a key of this service"):
        Settings(reward_variables=("ENVIRONMENT_API_KEY",))


async def test_a_cancelled_call_ends_its_process_and_what_that_started(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    async with pool("waits") as made:
        call = asyncio.create_task(made.judge(episode()))
        async with asyncio.timeout(60):
            while not (file := tmp_path / "waiting").exists() or len(pids := file.read_text().split()) < 2:
                await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        wait_until(lambda: not any(runs(int(pid)) for pid in pids))


async def judged_together(made, *truths):
    """One process: the first call takes what is there, one episode; the others wait for it together."""
    return await asyncio.gather(
        *(made.judge(episode(truth, str(index))) for index, truth in enumerate(truths)),
        return_exceptions=True,
    )


def scores(results):
    return [result if isinstance(result, Exception) else result.score for result in results]


async def test_a_batch_is_what_waits_when_a_process_is_free_up_to_a_bound():
    async with pool("together", max_reward_batch=3, reward_deadline_s=60.0) as made:
        found = await judged_together(made, "ok", "ok", "ok", "ok", "ok")
        assert [(one.score, one.reason) for one in found] == [
            (1, "0"), (3, "1"), (3, "2"), (3, "3"), (1, "4")
        ], "each gets its own result"  # fmt: skip

        # An episode is not judged after its caller stopped waiting.
        calls = [asyncio.create_task(made.judge(episode("ok", str(index)))) for index in range(3)]
        await asyncio.sleep(0)
        calls[1].cancel()
        first, _, third = await asyncio.gather(*calls, return_exceptions=True)
        assert scores((first, third)) == [1, 1]

        # One that the function cannot bear fails alone.
        first, second, bad, last = await judged_together(made, "ok", "ok", "bad", "ok")
        assert scores((first, second, last)) == [1, 1, 1]
        assert isinstance(bad, RewardFunctionFailed)

        # Once a further deadline is over no episode of a failed batch is begun; by this clock every look at
        # it is a deadline later.
        made.clock = itertools.count(step=60).__next__
        _, *rest = await judged_together(made, "ok", "ok", "bad", "ok")
        assert [one.code for one in rest] == ["reward_function_failed"] * 3


async def test_a_batch_that_hung_is_not_tried_again_one_by_one():
    async with pool("together", reward_deadline_s=1.0) as made:
        first, *rest = await judged_together(made, "ok", "ok", "hang", "ok")
    assert first.score == 1
    assert [one.code for one in rest] == ["reward_function_deadline"] * 3
    assert len({id(one) for one in rest}) == 3, "each has an error of its own"


async def test_who_waits_for_a_process_is_told_when_the_service_ends():
    async with pool("hangs") as made:
        calls = [asyncio.create_task(made.judge(episode())) for _ in range(3)]
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [CriticalError] * 3


def judges():
    return with_plugins(boards(), [FILE])


async def test_each_rollout_has_what_its_function_says_and_fails_alone():
    # two decisions, each a rise of "a": the environment's own outcome is 1 different name
    async with running_app(judges(), reward_deadline_s=2.0, max_reward_processes=1) as client:
        await accept(
            client,
            rollout("judged", reward_function="fair"),
            rollout("plain"),
            rollout("true", reward_function="truth", ground_truth={"answer": 42}),
            rollout("misfit", reward_function="misfit"),
            rollout("hangs", reward_function="hangs"),
            rollout("raises", reward_function="truth"),
        )
        found = await wait_for_all(client, 6)
    judged, plain = found["judged"].trajectory, found["plain"].trajectory
    assert judged.outcome_reward == 11.0
    assert [step.base_reward for step in judged.steps] == [0.0, 0.25]
    assert judged.warnings == ()
    assert judged.user_reward.environment_outcome_reward == plain.outcome_reward == 1.0
    assert plain.user_reward is None
    assert found["true"].trajectory.outcome_reward == 42.0
    misfit = found["misfit"].trajectory
    assert [step.base_reward for step in misfit.steps] == [1.0, None]
    assert len(misfit.warnings) == 3
    failures = {name: one.failure for name, one in found.items() if one.failure}
    assert {name: (told.code, told.decisions_done) for name, told in failures.items()} == {
        "hangs": ("reward_function_deadline", 2),
        "raises": ("reward_function_failed", 2),
    }
    assert found["hangs"].trajectory is None, "never a reward of 0"


async def test_info_names_the_functions_and_an_unknown_one_is_refused_before_anything_is_played():
    async with running_app(judges()) as client:
        found = (await client.get("/info")).json()["capabilities"]["reward_functions"]
        answer = await accept(client, rollout("r", reward_function="fare"))
    assert (found["fair"], found["together"]) == ("pointwise", "batch")
    assert answer.status_code == 422
    problem = answer.json()
    assert (problem["code"], problem["where"]) == ("unknown_name", "rollouts.0.reward_function")
    assert "Did you mean 'fair'?" in problem["detail"]


async def test_a_rollout_is_cancelled_while_it_is_judged():
    async with running_app(judges()) as client:
        await accept(client, rollout("r", reward_function="hangs"))
        answer = await client.delete("/rollouts/r")
    assert answer.json()["status"] == "cancelled"
