"""Source 1, "What to compute per decision", and when it stands in a step (DESIGN.md 4.1 and 4.2)."""

import pytest

from shared_schemas.rewards import StepRewards
from task_app.episode.decisions import achievements_added, achievements_status, step_metadata

ON = StepRewards(enabled=True, mode="decision_stepwise")


def test_the_two_deltas_differ_when_an_achievement_is_repeated():
    # wood was collected before and is collected again; a table is placed for the first time
    before = {"collect_wood": 1, "place_table": 0, "eat_cow": 0}
    after = {"collect_wood": 3, "place_table": 1, "eat_cow": 0}
    record = step_metadata(before, after, turn=5, step_rewards=ON).decision_rewards
    assert record is not None
    assert record.model_dump() == {
        "turn": 5,
        "ach_delta": 2,
        "unique_delta": 1,
        "all": ("collect_wood", "place_table"),
        "unique": ("place_table",),
    }


def test_a_decision_that_achieved_nothing_has_a_record_of_zeros():
    record = step_metadata({"a": 1}, {"a": 1}, turn=1, step_rewards=ON).decision_rewards
    assert record is not None
    assert (record.ach_delta, record.unique_delta, record.all, record.unique) == (0, 0, (), ())


@pytest.mark.parametrize(
    ("switches", "counts"),
    [
        (StepRewards(), {"a": 1}),
        (StepRewards(enabled=True, mode="off"), {"a": 1}),
        (StepRewards(enabled=True, mode="env_sparse"), {"a": 1}),
        (StepRewards(enabled=False, mode="decision_stepwise"), {"a": 1}),
        (ON, {}),
    ],
)
def test_no_record_unless_enabled_and_decision_stepwise_or_without_achievements(switches, counts):
    metadata = step_metadata(dict.fromkeys(counts, 0), counts, turn=1, step_rewards=switches)
    assert metadata.decision_rewards is None


def test_status_and_added_follow_the_counters():
    assert achievements_status({"a": 0, "b": 2}) == {"a": False, "b": True}
    assert achievements_added({"b": 1}, {"a": 1, "b": 2, "c": 0}) == ["a"]
