"""A learner of two ranks: the numbers of one process, and what happens when one rank fails."""

import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bench.study_ranks import LIMITS, Group, judged
from tests.conftest import tiny_job
from tests.trainer_backend.processes.test_learner_process import calls_in_order, huge, played
from trainer_backend import learner_parts
from trainer_backend.errors import CheckpointError, JobError, LearnerLost, NonFiniteLoss
from trainer_backend.job.load import dump_job
from trainer_backend.models.folder import load_model_folder
from trainer_backend.parts import LearnerFactory, Progress

__all__ = ["played"]
# A critic, a KL in the rewards, a rate that follows the KL of steps, and several passes; every rank has
# unequal pieces.
TABLES = {
    "cluster__launcher": "local",
    "algorithm__advantage": "gae",
    "training__kl_reward_coef": 0.1,
    "training__mismatch_limit": 1e9,
    "training__learning_rate_schedule": "desired_kl",
    "training__micro_batch_tokens": 512,
    "warmup__epochs": 1,
}
JOB = tiny_job(**TABLES, learner__nproc_per_node=2)
ALONE = tiny_job(**TABLES)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(JOB, tmp_path_factory.mktemp("ranks"))
    yield group
    group.end()


@pytest.fixture(scope="module")
def runs(group: Group, played, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run's checkpoints by one process and by two ranks, which gave the same results on the way."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    expected = calls_in_order(learner_parts.local_learners(ALONE), played, one)
    results = calls_in_order(group, played, two)
    of_updates = [found for found in results if isinstance(found, dict) and "optim/steps" in found]
    assert [found.pop("learner/ranks") for found in of_updates] == [2.0, 2.0]
    rates = [found["optim/lr"] for found in of_updates]
    assert rates[1] != rates[0], "the rate of a resume is the one that followed the first update"
    assert all(1.0 <= found.pop("learner/tokens_imbalance") < 2.0 for found in of_updates)
    for was, found in zip(expected, results, strict=True):
        for row in (was, found):
            if isinstance(row, dict):  # rows of two ranks are shorter, and share less
                row.pop("learner/tokens_computed", None)
        assert_close(found, was)
    return one, two


def assert_close(found: Any, expected: Any) -> None:
    """Equal but for what sums in another order come to, over ten optimizer steps."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, list | tuple):
        for here, there in zip(found, expected, strict=True):
            assert_close(here, there)
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-4)
    elif hasattr(expected, "policy_T"):
        assert_close((found.policy_T, found.reference_T), (expected.policy_T, expected.reference_T))
    else:
        assert found == expected


def apart(one: Path, other: Path) -> float:
    models = [load_model_folder(folder)[0] for folder in (one, other)]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_two_ranks_write_the_model_that_one_process_writes(runs):
    one, two = runs
    assert apart(one / "iteration_2", two / "iteration_2") < 5e-5  # they share other beginnings
    assert apart(two / "version_1", two / "iteration_1") == 0.0
    assert len(list((two / "version_1").glob("model-*-of-00002.safetensors"))) == 2


def test_two_ranks_find_cosines_and_send_tokens_to_the_experts_that_segments_name_as_one_process_does():
    """Scores and gradients of packed rows and of padded ones, some layers computed again."""
    found = judged(2, "experts", "cosines")
    assert found["experts"].pop("moved") > 0.01
    for figures in found.values():
        assert figures.keys() <= LIMITS.keys()
        assert all(value <= LIMITS[name] for name, value in figures.items())


def test_one_process_goes_on_from_what_two_ranks_saved_and_the_other_way_round(runs, group, played, tmp_path):
    one, two = runs
    _, episodes = played
    alone, progress = learner_parts.local_learners(ALONE).resumed(two / "iteration_1")
    alone.update(episodes, iteration=2)
    alone.save(tmp_path / "alone", progress)
    learner, progress = group.resumed(one / "iteration_1")
    learner.update(episodes, iteration=2)
    learner.save(tmp_path / "both", progress)
    assert progress == Progress(1, 1, 4)
    assert apart(tmp_path / "alone", two / "iteration_2") < 1e-6
    assert apart(tmp_path / "both", one / "iteration_2") < 1e-6


def test_an_error_that_every_rank_meets_ends_the_call_alone(runs, group, played):
    with pytest.raises(NonFiniteLoss) as caught:
        group.learner.update(huge(played[1]), iteration=3)
    assert caught.value.steps_taken == 0
    assert len(group.learner.score_ids(range(3, 12))) == 8


@pytest.mark.parametrize(("rank", "what"), [(1, "weights"), (0, "moments"), (1, "moments")])
def test_a_rank_whose_disk_is_full_ends_the_save_and_nothing_is_left_of_it(
    runs, group, tmp_path, rank: int, what: str
):
    saved, most = runs[1] / "iteration_1", 4096
    if what == "moments":
        weights, moments = (
            [path.stat().st_size for path in folder.glob("*.safetensors")]
            for folder in (saved, saved / "training_state/optimizer")
        )
        most = (max(weights) + min(moments)) // 2
        assert max(weights) < most < min(moments)
    limits = group.rank(rank).rlimit(resource.RLIMIT_FSIZE)
    group.rank(rank).rlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    with pytest.raises(CheckpointError, match="File too large"):
        group.learner.save(tmp_path / "iteration_9", Progress(9, 9, 9))
    group.rank(rank).rlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    group.learner.save(tmp_path / "iteration_9", Progress(9, 9, 9))


def test_a_job_of_another_number_of_ranks_is_refused(runs, group):
    with pytest.raises(JobError, match="2 ranks, but the job has 3"):
        group.connection.ask("open", dump_job(tiny_job(**TABLES, learner__nproc_per_node=3)))
    group.connection.ask("open", dump_job(JOB))


def test_a_critic_with_layers_of_its_own_is_shared_out_too(group, played, tmp_path):
    own = {
        **TABLES,
        "training__critic": "own",
        "training__critic_batch_decisions": 16,
        "training__entropy_coef": 0.0,
    }
    teacher, episodes = played
    parts = {item.rollout_id: item.segments for item in episodes}

    def trained(factory: LearnerFactory, folder: Path) -> list[Any]:
        learner = factory.fresh(teacher, None)
        learner.save(folder / "iteration_0", Progress())
        results = [learner.values(parts), learner.update(episodes, iteration=1)]
        learner.save(folder / "iteration_1", Progress(1, 1, 4))
        learner, progress = factory.resumed(folder / "iteration_1")
        results += [learner.values(parts), learner.update(episodes, iteration=2)]
        learner.save(folder / "iteration_2", Progress(2, 2, 8))
        return [progress, *results]

    one, two = tmp_path / "one", tmp_path / "two"
    alone = learner_parts.local_learners(tiny_job(**own))
    expected = trained(alone, one)
    group.connection.ask("open", dump_job(tiny_job(**own, learner__nproc_per_node=2)))
    results = trained(group, two)
    assert any(value != 0.0 for row in results[3].values() for value in row)
    for rows in zip(results, expected, strict=True):
        if isinstance(rows[0], dict):
            rows = [{key: row[key] for key in row if not key.startswith("learner/")} for row in rows]
        assert_close(*rows)
    assert alone.resumed(two / "iteration_2")[1] == Progress(2, 2, 8)
    files = [load_file(folder / "iteration_2/training_state/critic.safetensors") for folder in (one, two)]
    assert files[0].keys() == files[1].keys()
    assert max(float((files[0][name] - files[1][name]).abs().max()) for name in files[0]) < 1e-4


def test_a_rank_that_is_killed_ends_the_learner(runs, group):
    """The last one: nothing comes after it."""
    group.rank(1).kill()
    with pytest.raises(LearnerLost):
        while True:
            group.learner.hardware()
    assert group.process.wait(timeout=60) != 0
