"""A job with a critic for real: child process, HTTP, engine, values before credit, a head that learns."""

import pyarrow.parquet as pq
import pytest

from tests.conftest import ListReporter, rows_of, tiny_job, train_job, warmed_up
from trainer_backend.core.critic import ByToken
from trainer_backend.credit.recredit import recredit_run
from trainer_backend.rundir.rollout_files import finished_rows, read_rollouts, read_values

CREDIT = ("reward", "return_to_go", "advantage", "value", "token_advantages", "token_values")


def job_of(trained, name, **overrides):
    """By token with the values of the states that a limit left episodes in, by decision without."""
    return tiny_job(
        **warmed_up(trained), algorithm__advantage=name, algorithm__gae_lambda=0.9, evaluation__instances=1,
        algorithm__bootstrap_truncated=name == "gae_token", **overrides,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["gae", "gae_token"])
def run(request, trained, tmp_path_factory):
    job = job_of(trained, request.param)
    directory, _, progress = train_job(job, tmp_path_factory.mktemp("runs") / request.param)
    assert progress.iteration == 2
    return request.param, directory


def decisions_of(directory, iteration):
    rows = pq.read_table(directory.rollouts_file(f"iteration_{iteration}")).to_pylist()
    return [decision for row in rows for decision in row["decisions"]]


def test_values_are_0_first_and_then_what_was_learned(run):
    _, directory = run
    assert {decision["value"] for decision in decisions_of(directory, 1)} == {0.0}
    assert len({decision["value"] for decision in decisions_of(directory, 2)}) > 10
    first, second = rows_of(directory, "iteration")
    assert first["value/mean"] == first["value/explained_variance"] == 0.0
    assert first["value/loss"] > 0.0 and second["value/loss"] > 0.0


def test_the_return_of_a_decision_is_advantage_plus_value_of_what_was_read_there(run):
    name, directory = run
    for decision in decisions_of(directory, 2):
        if name == "gae":
            assert decision["token_values"] is None
            assert decision["return_to_go"] == decision["advantage"] + decision["value"]
        else:
            tokens, values = decision["token_advantages"], decision["token_values"]
            assert decision["value"] == values[0]
            assert decision["return_to_go"] == tokens[0] + values[0]
            assert decision["advantage"] == pytest.approx(sum(tokens) / len(tokens))


def test_an_episode_that_a_limit_cut_short_goes_on_with_the_value_of_the_state_it_was_left_in(run):
    name, directory = run
    path = directory.rollouts_file("iteration_2")
    rows = {row["rollout_id"]: row for row in finished_rows(path, ["rollout_id", "value_after", "decisions"])}
    cut = [item for item in read_rollouts(path) if item.trajectory.cut_short]
    assert cut, "a tiny policy survives eight decisions"
    others = []
    for item in cut:
        last, after = rows[item.rollout_id]["decisions"][-1], rows[item.rollout_id]["value_after"]
        if name == "gae":
            assert (item.trajectory.final_view, after) == (None, None)
            continue
        view, seen = item.trajectory.final_view, item.trajectory.steps[-1].policy_logprobs
        assert view.prompt_ids_reused == 0, "prompts are fresh"
        if view.prompt_token_ids == seen.prompt_token_ids:  # nothing moved: one prompt, one value
            assert after == pytest.approx(last["value"], abs=1e-5)
        else:
            others.append(after)
        gamma = directory.job().algorithm.gamma
        expected = last["reward"] + gamma * after - last["token_values"][-1]
        assert last["token_advantages"][-1] == pytest.approx(expected, abs=1e-12)
    assert len(set(others)) > 1 or name == "gae"
    _, row = rows_of(directory, "iteration")
    assert row.get("advantages/bootstrapped") == (float(len(cut)) if name == "gae_token" else None)


def test_stored_values_replay_the_credit_of_the_run_to_the_last_digit(run, tmp_path):
    name, directory = run
    recredit_run(directory.path, [name], [2], None, tmp_path, (), reporter=ListReporter())
    again = pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
    replayed = [decision for row in again for decision in row["decisions"]]
    stored = decisions_of(directory, 2)
    assert [[d[key] for key in CREDIT] for d in replayed] == [[d[key] for key in CREDIT] for d in stored]


def test_a_critic_by_token_also_tells_of_decisions_and_one_by_decision_not_of_tokens(run, tmp_path):
    name, directory = run
    values = read_values(directory.rollouts_file("iteration_2"))
    assert {type(found) for found in values.values()} == {ByToken if name == "gae_token" else list}
    recredit_run(directory.path, ["gae", "gae_token"], [2], None, tmp_path, (), reporter=ListReporter())
    assert (tmp_path / "gae.parquet").exists()
    assert (tmp_path / "gae_token.parquet").exists() == (name == "gae_token")
    assert len(finished_rows(tmp_path / "gae.parquet", ["decisions"])) == 8


@pytest.mark.parametrize("run", ["gae_token"], indirect=True)  # the same for every estimator
def test_a_run_with_a_critic_is_resumed_with_it(run, trained):
    name, directory = run
    more = job_of(trained, name, training__iterations=3)
    _, reporter, progress = train_job(more, directory.path, resume=directory)
    assert progress.iteration == 3
    assert not any("value head" in line for line in reporter.lines)
    assert len({decision["value"] for decision in decisions_of(directory, 3)}) > 10
