"""What a stage lost, in words and in a row of metrics, and the share that ends the run."""

import pytest

from shared_schemas.rollouts import RolloutFailure
from tests.trainer_backend.collect.scripted_task_app import answer_to, make_request
from trainer_backend.collect.batch import Batch, LossCheck
from trainer_backend.collect.losses import losses_in, sum_losses
from trainer_backend.errors import JobTeachesNothing, NothingToLearnFrom, TooManyLost


def stage(total: int, *details: str, recurs: bool = False) -> Batch:
    """A batch that lost one rollout for each detail."""
    failed = [
        answer_to(make_request(number), status="failed").model_copy(
            update={"failure": RolloutFailure(code="critical_error", detail=detail, recurs=recurs)}
        )
        for number, detail in enumerate(details)
    ]
    finished = [answer_to(make_request(number)) for number in range(len(details), total)]
    return Batch(tuple(finished), tuple(failed))


def test_causes_are_counted_whatever_numbers_and_ids_they_quote_the_most_common_one_first():
    own = make_request(3).rollout_id
    causes = ["no level 7 (plug.py:14)", "disk full", "no level 31 (plug.py:14)", f"{own}: it 'a' hung"]
    losses = stage(9, *causes).losses
    assert losses.describe("iteration 2") == (
        "iteration 2: 4 of 9 rollouts lost: 2 x no level 7 (plug.py:14); 1 x disk full; 1 x …: it 'a' hung"
    )
    # Errors at two lines are two causes, and the words are those of most of them.
    keys = [f"KeyError: '{key}' (plug.py:{line})" for key, line in (("a", 14), ("b", 99), ("b", 99))]
    assert stage(3, *keys).losses.causes == ((2, keys[1]), (1, keys[0]))
    one = stage(3, "no level 7").losses
    assert one.describe("prompts") == "prompts: 1 of 3 rollouts lost: no level 7"


def test_a_row_of_metrics_tells_the_losses_again_and_makes_no_curve_of_a_cause():
    losses = stage(9, "a", "b", "a").losses
    row = losses.row()
    assert losses_in(row) == losses
    assert row["rollout/lost_causes"] == [[2, "a"], [1, "b"]]
    assert "rollout/lost_causes" not in stage(3).losses.row()
    sums = {"rollout/failed": 3.0, "rollout/finished": 6.0, "branch/failed": 1.0, "branch/rollouts": 2.0}
    assert (sum_losses(sums).lost, sum_losses(sums).total) == (4, 12)


@pytest.mark.parametrize(
    ("total", "lost", "error"),
    [
        (10, 2, None),  # the share itself is allowed
        (10, 3, TooManyLost),
        (7, 6, None),  # too few to call it no accident
        (7, 7, NothingToLearnFrom),
    ],
)
def test_a_share_that_is_no_accident_ends_the_stage(total: int, lost: int, error: type[Exception] | None):
    batch = stage(total, *["no level"] * lost)
    if error is None:
        LossCheck(most=0.2).refuse(batch, "warm-up")
        return
    with pytest.raises(error, match=f"^warm-up: {lost} of {total} rollouts lost: no level") as caught:
        LossCheck(most=0.2).refuse(batch, "warm-up")
    assert type(caught.value) is error


@pytest.mark.parametrize("recurs", [True, False])
def test_what_recurs_is_told_from_what_may_pass(recurs: bool):
    with pytest.raises(NothingToLearnFrom) as caught:
        LossCheck().refuse(stage(2, "a", "a", recurs=recurs), "prompts")
    assert isinstance(caught.value, JobTeachesNothing) is recurs
    with pytest.raises(TooManyLost) as too_many:
        LossCheck(most=0.2).refuse(stage(8, *"aaaa", recurs=recurs), "prompts")
    assert too_many.value.recurs is recurs
