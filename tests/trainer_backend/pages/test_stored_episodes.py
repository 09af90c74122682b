from tests.trainer_backend.pages.hand_made import FIRST, LAST, WOOD, rollout
from trainer_backend.core.intervals import paired_success_interval
from trainer_backend.evaluation.best import paired_difference
from trainer_backend.pages.report import best_episode, reward_by_turn
from trainer_backend.rundir.rollout_files import Credit, write_rollouts


def failed(item):
    return item.model_copy(update={"status": "failed", "trajectory": None, "rollout_id": "lost"})


def stored(path, rollouts, credits=None):
    write_rollouts(path, rollouts, credits)
    return path


def test_what_a_server_calls_its_model_takes_no_episode_from_the_actor(tmp_path):
    (played,) = [rollout(1, [WOOD])]
    told = [
        played.model_copy(update={"trajectory": played.trajectory.model_copy(update={"model": model})})
        for model in ("", "Qwen/Qwen3-0.6B", "tiny/actor", "tiny/fixed")
    ]
    named = [item.model_copy(update={"rollout_id": str(i)}) for i, item in enumerate(told)]
    credits = [Credit([float(i)], [0.0]) for i in range(4)]
    assert reward_by_turn([stored(tmp_path / "a.parquet", named, credits)], "tiny") == [1.0], "0, 1 and 2"


def test_an_episode_that_ended_earlier_counts_0_at_later_turns(tmp_path):
    long = stored(tmp_path / "a.parquet", [rollout(1, [(), (), ()])], [Credit([1.0, 0.0, 2.0], [0.0] * 3)])
    short = stored(tmp_path / "b.parquet", [rollout(2, [()])], [Credit([0.5], [0.0])])
    assert reward_by_turn([long, short], "tiny") == [0.75, 0.0, 1.0]
    assert reward_by_turn([], "tiny") == []


def test_differences_are_taken_world_by_world(tmp_path):
    first, last = stored(tmp_path / "a.parquet", FIRST), stored(tmp_path / "b.parquet", LAST)
    assert paired_difference(first, last).mean == 1.5
    assert paired_difference(first, last, without={10}).count == paired_difference(first, last).count - 1
    assert paired_difference(first, stored(tmp_path / "c.parquet", [rollout(99, [WOOD])])) is None


def test_a_difference_of_successes_has_an_interval_of_its_own(tmp_path):
    first = stored(tmp_path / "a.parquet", [rollout(10, [()]), rollout(11, [WOOD])])
    last = stored(tmp_path / "b.parquet", [rollout(10, [WOOD]), rollout(11, [WOOD])])
    # one gain and no loss in two worlds: Student's t would reach from 0.5 - 6.4 to 0.5 + 6.4
    assert paired_difference(first, last) == paired_success_interval([1.0, 0.0])


def test_of_equally_good_episodes_the_shorter_one_is_shown(tmp_path):
    episodes = [rollout(1, [WOOD, ()]), rollout(2, [WOOD]), rollout(3, [()])]
    found = best_episode(stored(tmp_path / "a.parquet", [*episodes, failed(episodes[0])]))
    assert (found.trajectory.seed, len(found.trajectory.steps)) == (2, 1)
    assert best_episode(stored(tmp_path / "b.parquet", [failed(episodes[0])])) is None
