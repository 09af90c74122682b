"""KL in the reward for real: scored before credit, paid in r_t, stored, and credited again from that."""

import math

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from tests.conftest import ListReporter, rows_of, tiny_job, train_job, warmed_up
from trainer_backend.credit.inspect import episode_view, find_rollout
from trainer_backend.credit.recredit import recredit_run
from trainer_backend.errors import RewardError

COEF = 0.25
KEYS = {
    "training__kl_reward_coef": COEF,
    "training__learning_rate": 0.02,
    "training__step_rewards_enabled": True,
    "training__step_rewards_mode": "decision_stepwise",
    "evaluation__instances": 1,
}


@pytest.fixture(scope="module", params=["stepwise", "branch"])
def run(request, trained, tmp_path_factory):
    few = {"algorithm__branches_per_episode": 1} if request.param == "branch" else {}
    job = tiny_job(algorithm__advantage=request.param, **warmed_up(trained), **KEYS, **few)
    directory, _, progress = train_job(job, tmp_path_factory.mktemp("runs") / request.param)
    assert progress.iteration == 2
    return request.param, directory


def decisions_of(path):
    return [decision for row in pq.read_table(path).to_pylist() for decision in row["decisions"] or ()]


def kl_of(decision):
    pairs = zip(decision["token_logprobs"], decision["token_reference_logprobs"], strict=True)
    return [own - other for own, other in pairs]


def test_at_first_the_policy_is_its_own_reference_and_pays_nothing(run):
    _, directory = run
    for decision in decisions_of(directory.rollouts_file("iteration_1")):
        assert decision["token_logprobs"] == pytest.approx(decision["token_reference_logprobs"], abs=1e-5)
        assert decision["reward"] == pytest.approx(decision["unique_delta"], abs=1e-4)


def test_then_a_decision_earns_its_unlocks_less_its_kl(run):
    _, directory = run
    decisions = decisions_of(directory.rollouts_file("iteration_2"))
    paid = [-COEF * math.fsum(kl_of(decision)) for decision in decisions]
    assert any(abs(value) > 1e-3 for value in paid)
    for decision, kl in zip(decisions, paid, strict=True):
        assert decision["reward"] == decision["unique_delta"] + kl
    row = rows_of(directory, "iteration")[1]
    nats = [value for decision in decisions for value in kl_of(decision)]
    assert row["kl/reference"] == pytest.approx(math.fsum(nats) / len(nats))
    assert row["reward/kl"] == pytest.approx(math.fsum(paid) / 8)
    # what was earned is told without it
    assert row["reward/sum"] == row["decision/unique_sum"]


def test_what_is_stored_gives_the_same_credit_again_and_another_kind_on_demand(run, tmp_path):
    name, directory = run
    recredit_run(directory.path, [name], [2], None, tmp_path / "same", (), reporter=ListReporter())
    columns = ("reward", "return_to_go", "advantage")
    stored = decisions_of(directory.rollouts_file("iteration_2"))
    again = decisions_of(tmp_path / "same" / f"{name}.parquet")
    assert [[d[c] for c in columns] for d in again] == [[d[c] for c in columns] for d in stored]
    overrides = ("training.kl_reward_kind=k2",)
    recredit_run(directory.path, [name], [2], None, tmp_path / "k2", overrides, reporter=ListReporter())
    for before, now in zip(stored, decisions_of(tmp_path / "k2" / f"{name}.parquet"), strict=True):
        half_squares = math.fsum(d * d / 2 for d in kl_of(before))
        assert now["reward"] == before["unique_delta"] - COEF * half_squares


def test_inspect_shows_how_far_a_decision_is_from_the_reference(run):
    _, directory = run
    rollout, credits = find_rollout([directory], "train/2/0/0")
    console = Console(width=200, record=True)
    console.print(episode_view(rollout, credits, full=False))
    shown = console.export_text()
    assert "nats to reference" in shown
    assert f"{math.fsum(kl_of(credits[0])):+.3f}" in shown


def test_branches_pay_as_their_episodes_do(run):
    name, directory = run
    path = directory.rollouts_file("branches_2")
    assert path.exists() is (name == "branch")
    if path.exists():
        assert all(decision["token_logprobs"] for decision in decisions_of(path))


@pytest.mark.parametrize("run", ["stepwise"], indirect=True)  # the same for every estimator
def test_a_resumed_run_holds_to_the_same_reference(run, trained):
    name, directory = run
    more = tiny_job(algorithm__advantage=name, training__iterations=3, **warmed_up(trained), **KEYS)
    train_job(more, directory.path, resume=directory)
    third = rows_of(directory, "iteration")[2]
    assert abs(third["kl/reference"]) > 1e-3, "were it the policy of the resumed run, it would be 0"


def test_rollouts_that_were_never_scored_are_refused_by_name(trained, tmp_path):
    directory, _, _ = trained
    with pytest.raises(RewardError, match=r"rollout .*: no log-probs .* training.kl_reward_coef = 1.0 needs"):
        recredit_run(
            directory.path,
            ["stepwise"],
            [1],
            None,
            tmp_path,
            ["training.kl_reward_coef=1.0"],
            reporter=ListReporter(),
        )
