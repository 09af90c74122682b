"""Rows of a data set in place of worlds: each once before any again, the same after a resume."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from shared_schemas.rollouts import InteractionSpec, Rollout
from tests.trainer_backend.pages.hand_made import WOOD, rollout
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.sources import make_origin, read_row_id
from trainer_backend.data.dataset import DataSet
from trainer_backend.data.rows import Row
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig

MODEL = Inference("http://127.0.0.1:1", "job/actor", SecretStr("key"))


def job_with(**tables: dict[str, object]) -> JobConfig:
    """Two groups of three an iteration, unless it is said otherwise."""
    document = {
        "model": {"preset": "tiny-0.3m"},
        "data": {"path": "rows.jsonl", "held_out_share": 0.5},
        "rollout": {"env_name": "dialogue", "episodes_per_batch": 6},
        "training": {"group_size": 3},
        **tables,
    }
    return parse_job(document, where="test").config


def rows(count: int) -> tuple[Row, ...]:
    return tuple(Row(f"train/{n}", f"What is {n}?", ground_truth=n) for n in range(count))


def planner(count: int = 5, held_out: int = 2, **tables: dict[str, object]) -> Planner:
    evaluation = tuple(Row(f"test/{n}", f"And {n}?", ground_truth=n) for n in range(held_out))
    return job_parts.planner(job_with(**tables), "run", MODEL, DataSet(rows(count), evaluation))


def played(requests) -> list[str | None]:
    """The row of each group, in order."""
    return [read_row_id(request.group_id) for request in requests if request.sibling == 0]


def test_a_row_is_what_siblings_share():
    first, second, third, other, *_ = planner().training(1)
    assert first.group_id == second.group_id == third.group_id != other.group_id
    assert first.start == second.start == third.start != other.start
    row_id = read_row_id(first.group_id)
    number = int(row_id.removeprefix("train/"))
    assert first.group_id == f"train/1/0/train/{number}"
    assert first.env.config == {"prompt": f"What is {number}?"}
    assert first.ground_truth == number
    assert len({request.policy.seed for request in planner().training(1)}) == 6


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 17), st.integers(1, 5), st.integers(0, 2**31 - 1), st.booleans())
def test_each_row_comes_once_before_any_comes_again(count: int, groups: int, seed: int, shuffle: bool):
    plan = planner(
        count,
        job={"seed": seed},
        rollout={"episodes_per_batch": groups},
        training={"group_size": 1},
        data={"path": "rows.jsonl", "held_out_share": 0.5, "shuffle": shuffle},
    )
    iterations = -(-3 * count // groups)
    sequence = [row for k in range(1, iterations + 1) for row in played(plan.training(k))]
    everything = {row.id for row in rows(count)}
    for epoch in range(3):
        assert set(sequence[epoch * count : (epoch + 1) * count]) == everything
    if not shuffle:
        assert sequence[:count] == [row.id for row in rows(count)]


def test_a_resumed_run_goes_on_where_it_was_for_the_iteration_is_the_position():
    whole = [played(planner(9).training(iteration)) for iteration in range(1, 8)]
    resumed = planner(9)  # knows nothing of the first three
    assert [played(resumed.training(iteration)) for iteration in range(4, 8)] == whole[3:]
    # Refills of an iteration take rows out of turn, and do not move the next iterations.
    resumed.refill(4, 1, groups=2)
    assert played(resumed.training(5)) == whole[4]


def test_the_model_is_told_the_lower_of_the_lengths_that_bound_its_prompt():
    def told(inference: Inference, **multi_turn: object) -> int | None:
        job = job_with(multi_turn=multi_turn)
        plan = job_parts.planner(job, "run", inference, DataSet(rows(2), rows(1)))
        return plan.training(1)[0].policy.config.get("max_model_length")

    ours = replace(MODEL, max_model_len=1024)
    assert told(ours, enable=True, max_model_length=8192) == 1024
    assert told(ours, enable=True, max_model_length=512) == 512
    assert told(MODEL, enable=True, max_model_length=8192) == 8192, "a foreign server"
    assert told(ours) is None


def test_a_row_keeps_its_place_when_others_are_listed_before_it():
    plans = [
        job_parts.planner(job_with(), "run", MODEL, DataSet(order, ()))
        for order in (rows(30), rows(30)[::-1])
    ]
    assert plans[0].training(2) == plans[1].training(2)


def test_refills_take_rows_that_the_iteration_has_not_played_first():
    plan = planner(5)
    first = played(plan.training(2))
    more = played(plan.refill(2, 1, groups=2)) + played(plan.refill(2, 2, groups=1, refilled=2))
    assert sorted([*first, *more]) == sorted(row.id for row in rows(5))
    assert set(played(plan.refill(2, 3, groups=2, refilled=3))) == set(first)


def test_every_evaluation_plays_the_held_out_rows_and_training_never_does():
    plan = planner(5, held_out=3)
    other = planner(5, held_out=3, job={"seed": 7})
    assert played(plan.evaluation("0")) == played(other.evaluation("9")) == ["test/0", "test/1", "test/2"]
    asked = [*plan.training(1), *plan.refill(1, 1, groups=9), *plan.prompts(7)]
    assert {read_row_id(request.group_id).partition("/")[0] for request in asked} == {"train"}


def test_a_branch_is_played_on_the_row_of_its_parent():
    request = planner(algorithm={"advantage": "branch"}).training(1)[3]
    found = rollout(request.start.seed, [WOOD, WOOD])
    kept = found.trajectory.steps[1].model_copy(update={"snapshot": "kept"})
    trajectory = found.trajectory.model_copy(update={"steps": (found.trajectory.steps[0], kept)})
    parent: Rollout = found.model_copy(
        update={"rollout_id": request.rollout_id, "group_id": request.group_id, "trajectory": trajectory}
    )
    branches = planner(algorithm={"advantage": "branch"}).branches([parent])
    assert branches
    for branch in branches:
        assert branch.env == request.env
        assert branch.ground_truth == request.ground_truth


def test_a_document_is_held_by_the_environment_and_messages_open_the_dialogue_as_they_are():
    row = Row("a-1", "Who?", document="Ada did.", ground_truth=["Ada"])
    held = {"document_content": "Ada did.", "question": "Who?", "ground_truth": ["Ada"]}
    assert make_origin(row).env_config == held
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})
    assert make_origin(Row("a", messages)).env_config == {"prompt": [dict(message) for message in messages]}


def test_who_answers_as_the_user_is_the_rows_choice_and_else_that_of_the_job():
    own = InteractionSpec(name="weather", kwargs={"city": "Oslo"})
    nameless = InteractionSpec(kwargs={"query": "q", "ground_truth": "a"})
    of_the_job = InteractionSpec(name="gsm8k", kwargs={"query": "?", "ground_truth": "4"})
    for rows_own, default, expected in (
        (None, None, None),
        (None, "gsm8k", of_the_job),
        (own, "gsm8k", own),
        (nameless, None, nameless),
        (nameless, "gsm8k", nameless.model_copy(update={"name": "gsm8k"})),
    ):
        row = Row("a", "?", ground_truth="4", interaction=rows_own)
        assert make_origin(row, interaction=default).interaction == expected


def test_worlds_name_no_row():
    assert read_row_id("train/3/0") is None
    assert read_row_id("eval-3/0/12/gsm8k/17") == "gsm8k/17"


def test_a_plan_without_the_rows_of_its_job_is_refused():
    with pytest.raises(ValueError, match=r"needs the rows of \[data\]"):
        job_parts.planner(job_with(), "run", MODEL).training(1)
