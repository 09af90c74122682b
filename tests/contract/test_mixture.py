"""Whole runs with fixed policies next to the actor: HTTP, engines, objectives, a kill, files, the report."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.conftest import ListReporter, rows_of, tiny_job, train_job
from trainer_backend.__main__ import app
from trainer_backend.core.policies import name_player, parse_policy
from trainer_backend.credit.recredit import recredit_run
from trainer_backend.job.load import load_job
from trainer_backend.models.folder import fingerprint
from trainer_backend.operator_plugins import load_plugins
from trainer_backend.rundir.layout import FIXED_RECORD
from trainer_backend.rundir.rollout_files import finished_rows, read_rollouts

ROOT = Path(__file__).parents[2]
ITERATIONS = (1, 2, 3)


def job_of(trained, **overrides):
    """The actor begins where the tiny run's did; so does `twin`, while `later` is that run's end."""
    checkpoints = trained[0].checkpoints
    settings = {
        "model": {"path": str(checkpoints / "iteration_0"), "device": "cpu"},
        "warmup": None,
        "rollout_only": [
            {"name": "twin", "model_path": str(checkpoints / "iteration_0")},
            {"name": "later", "model_path": str(checkpoints / "iteration_2")},
        ],
        "rollout_allocation_schedule": {"type": "constant", "alpha": 0.4, "unit": "rollout"},
        "rollout__max_turns": 5,
        "training__iterations": len(ITERATIONS),
        "evaluation__every_n_iters": 3,
        "evaluation__instances": 2,
    }
    return tiny_job(**{**settings, **overrides})


@pytest.fixture(scope="module")
def mixed(trained, tmp_path_factory):
    return train_job(job_of(trained), tmp_path_factory.mktemp("runs") / "mixed")


OF_THE_OPERATOR = """\
import numpy as np
from trainer_backend.operator_plugins import aggregation, schedule

@schedule("fixed_until")
class FixedUntil:
    def __init__(self, window):
        self.window = window
    def get_policy_choice(self, step):
        return "fixed" if step < self.window else "actor"

@aggregation("segment_mean")
def segment_mean(segments):
    return [np.full(n, 1 / (len(segments) * n)) for n in map(len, (part.logprobs for part in segments))]
"""


@pytest.fixture(scope="module")
def by_iteration(trained, tmp_path_factory):
    """The first iteration by a fixed policy, the second by the actor; as source 4 publishes it.

    The schedule and the aggregation are of a file of the operator's.
    """
    folder = tmp_path_factory.mktemp("runs")
    (folder / "mine.py").write_text(OF_THE_OPERATOR)
    job = job_of(
        trained,
        job={"name": "tiny", "seed": 1, "trainer_plugins": [str(folder / "mine.py")]},
        rollout_only={"model_path": str(trained[0].path), "objective": "single_ratio"},
        rollout_allocation_schedule={"type": "fixed_until", "window": 2},
        training__iterations=2,
        training__aggregation="segment_mean",
    )
    yield train_job(job, folder / "by_iteration")
    load_plugins([])


def stored(directory, iteration):
    return read_rollouts(directory.rollouts_file(f"iteration_{iteration}"))


def choices(directory, iteration):
    """By group and sibling, who sampled it."""
    return {
        (item.group_id, item.sibling): parse_policy(item.trajectory.model)
        for item in stored(directory, iteration)
    }


def test_siblings_are_sampled_by_several_policies_and_stored_with_them(mixed):
    directory, _, progress = mixed
    assert progress.iteration == len(ITERATIONS)
    sampled = [policy for number in ITERATIONS for policy in choices(directory, number).values()]
    assert len(sampled) == 24 and set(sampled) == {"actor", "twin", "later"}
    rows = finished_rows(directory.rollouts_file("iteration_1"), ["rollout_id", "model", "policy_name"])
    assert {row["model"] for row in rows} <= {"tiny/actor", "tiny/twin", "tiny/later"}
    # Who sampled stands in `model` alone: one class of the task app asks for all of them.
    assert {row["policy_name"] for row in rows} == {"openai"}
    assert len({name_player(row["model"], row["policy_name"]) for row in rows}) > 1
    assert all(
        step.policy_logprobs.logprobs for item in stored(directory, 1) for step in item.trajectory.steps
    )


def test_a_row_of_metrics_counts_what_each_policy_played(mixed):
    directory, _, _ = mixed
    for row in rows_of(directory, "iteration"):
        sampled = list(choices(directory, row["iteration"]).values())
        for policy in ("actor", "twin", "later"):
            assert row[f"mixture/{policy}/episodes"] == sampled.count(policy)
        assert row["rollout/policy_choice"] == sampled.count("actor") / 8
        assert row["mixture/alpha"] == 0.4
        assert row["actor/importance_sampling"] == row["rollout/using_fixed"] == 1.0
        assert row.get("mismatch/logprob_max", 0.0) < 1e-4, "of the actor's own samples"


def test_a_fixed_policy_that_is_the_actor_weighs_one(mixed):
    first, *_, last = rows_of(mixed[0], "iteration")
    assert first["mixture/twin/weight_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["mixture/twin/ess"] == pytest.approx(1.0, abs=1e-3)
    assert first["mixture/later/ess"] < 1.0 - 1e-3, "another model's samples count as fewer"
    assert last["mixture/twin/ess"] < 1.0 - 1e-6, "the actor has moved on"


def test_what_sampled_at_the_end_is_what_was_loaded(mixed, trained):
    directory, reporter, _ = mixed
    recorded = json.loads((directory.path / FIXED_RECORD).read_text())
    for name, checkpoint in (("twin", "iteration_0"), ("later", "iteration_2")):
        folder = trained[0].checkpoints / checkpoint
        digest = recorded[name]["sha256"]
        assert digest == fingerprint(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True))
        assert any(f"{name!r}: its weights are as they were loaded, sha256 {digest[:12]}" in line
                   for line in reporter.lines)  # fmt: skip
    assert any("fixed" in line for line in reporter.lines if line.startswith("memory"))
    start, end = (load_file(directory.checkpoints / f"iteration_{n}" / "model.safetensors") for n in (0, 3))
    assert any(not torch.equal(start[name], end[name]) for name in start), "the actor was trained"


def test_stored_rollouts_are_credited_again_to_the_same_numbers(mixed, tmp_path):
    directory, _, _ = mixed
    recredit_run(directory.path, ["stepwise"], [1], None, tmp_path, (), reporter=ListReporter())
    columns = ["rollout_id", "decisions"]
    again = finished_rows(tmp_path / "stepwise.parquet", columns)
    assert again == finished_rows(directory.rollouts_file("iteration_1"), columns)
    _, folder = recredit_run(
        directory.path,
        ["stepwise", "grpo"],
        [1],
        directory.checkpoints / "iteration_3",
        tmp_path / "c",
        (),
        reporter=ListReporter(),
    )
    [pair] = json.loads((folder / "figures.json").read_text())["pairs"]
    assert -1.0 <= pair["gradient_cosine"] <= 1.0


@pytest.mark.parametrize("command", ["recredit", "train --resume"])
def test_a_run_keeps_its_name_by_which_its_rollouts_tell_who_sampled(mixed, command: str):
    directory, _, _ = mixed
    kept = (directory.path / "job.toml").read_bytes()
    words = [*command.split(), str(directory.path), "--set", "job.name=other"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code != 0
    assert f"holds rollouts of '{directory.job().job.name}': a run keeps its name" in str(ended.exception)
    assert (directory.path / "job.toml").read_bytes() == kept


def test_inspect_tells_who_sampled(mixed):
    directory, _, _ = mixed
    rollout = next(item for item in stored(directory, 1) if parse_policy(item.trajectory.model) != "actor")
    command = ["inspect", rollout.rollout_id, "--run", str(directory.path), "--tokens"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert f"openai {rollout.trajectory.model}; outcome" in " ".join(shown.output.split())


def test_an_iteration_that_a_fixed_policy_played_trains_the_actor_and_tells_nothing_of_it(by_iteration):
    directory, _, _ = by_iteration
    first, second = rows_of(directory, "iteration")
    assert set(choices(directory, 1).values()) == {"fixed"} and set(choices(directory, 2).values()) == {
        "actor"
    }
    assert (first["rollout/policy_choice"], second["rollout/policy_choice"]) == (0.0, 1.0)
    assert (first["actor/importance_sampling"], second["actor/importance_sampling"]) == (1.0, 0.0)
    assert "actor/importance_weight_mean" in first and "actor/importance_weight_mean" not in second
    whole = ("decision/", "reward/", "stop/", "mismatch/", "inference/")
    rooms = (*whole, "loss/entropy", "loss/ratio", "loss/clip")
    assert not [name for name in first if name.startswith(rooms)]
    assert all(any(name.startswith(room) for name in second) for room in rooms)
    before, after = (
        load_file(directory.checkpoints / f"iteration_{n}" / "model.safetensors") for n in (0, 1)
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def shipped(trained, tmp_path_factory):
    """configs/crafter_mixture.toml in small; by groups, with a critic, without a clip."""
    small = [
        f'rollout_only.model_path="{trained[0].path}"', "rollout_only.objective=reinforce",
        "rollout_only.behaviour_weight_level=episode", "rollout_only.train_value_head=true",
        "algorithm.advantage=gae",
        "rollout_allocation_schedule.unit=group", "rollout_allocation_schedule.alpha_0=0.4",
        "training.iterations=1", "training.threads=1", "rollout.episodes_per_batch=16",
        "rollout.max_turns=6", "warmup.episodes=8", "evaluation.instances=2", "evaluation.every_n_iters=1",
    ]  # fmt: skip
    job = load_job(ROOT / "configs" / "crafter_mixture.toml", small).config
    return train_job(job, tmp_path_factory.mktemp("runs") / "shipped")


def test_the_job_that_ships_runs_by_groups_with_the_tokenizer_of_its_fixed_policy(shipped, trained):
    directory, _, progress = shipped
    assert progress.iteration == 1
    by_group = {}
    for (group, _), policy in choices(directory, 1).items():
        by_group.setdefault(group, set()).add(policy)
    assert {len(policies) for policies in by_group.values()} == {1}
    assert {policy for policies in by_group.values() for policy in policies} == {"actor", "fixed"}
    tokenizers = [path / "tokenizer.json" for path in (directory.checkpoints / "iteration_0",
                                                       trained[0].checkpoints / "iteration_0")]  # fmt: skip
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes(), "it has the fixed policy's"


def test_a_critic_learns_from_fixed_samples_where_it_is_asked_to(shipped):
    [row] = rows_of(shipped[0], "iteration")
    assert row["value/loss"] >= 0.0
    assert 0.0 < row["mixture/fixed/ess"] <= 1.0
