"""Schedules and aggregations from a file of the operator's, or a package: in a job, checked, and used."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.trainer_backend.segment_columns import lists, make_segment
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import BatchError, JobError
from trainer_backend.job.load import LoadedJob, dump_job, load_job, parse_job
from trainer_backend.operator_plugins import load_plugins
from trainer_backend.plugins import AGGREGATIONS, aggregation

pytestmark = pytest.mark.usefixtures("own_boards")
TREE = Path(__file__).parents[2]
PULSES, ROOTS = ((TREE / "examples/plugins" / name).read_text("utf-8") for name in ("pulses.py", "roots.py"))
HEAD = """\
from dataclasses import dataclass
import random
from trainer_backend.core.allocation import ConstantSchedule, DrawnSchedule, RolloutAllocationSchedule
from trainer_backend.operator_plugins import aggregation, schedule
"""
CHOOSES = HEAD + '@schedule("mine")\nclass Mine:\n    def get_policy_choice(self, step):\n        return {}\n'
DRAWS = (
    HEAD + '@schedule("mine")\nclass Mine(DrawnSchedule):\n    def alpha_at(self, step):\n        return {}\n'
)
WEIGHS = HEAD + '@aggregation("mine"{})\ndef mine(segments):\n    return {}\n'
ONES = "[[1.0] * len(segment.logprobs) for segment in segments]"
JOB: dict[str, Any] = {
    "model": {"path": "m"},
    "rollout_only": {"model_path": "teacher"},
    "rollout": {"episodes_per_batch": 4},
    "training": {"group_size": 2, "iterations": 12},
}
# Decisions of one and three tokens; of four.
SEGMENTS = [
    make_segment("a", (1,) * 6, [-1, 0, -1, 1, 1, 1], (0.0,) * 6),
    make_segment("b", (1,) * 5, [-1, 0, 0, 0, 0], (0.0,) * 5),
]


def job_with(folder: Path, code: str, *overrides: str, name: str = "mine", **keys: Any) -> LoadedJob:
    (folder / "mine.py").write_text(code, encoding="utf-8")
    tables = {"job": {"trainer_plugins": [str(folder / "mine.py")]}}
    tables["rollout_allocation_schedule"] = {"type": name, **keys}
    return parse_job({**JOB, **tables}, where="job.toml", overrides=overrides)


def refusal(folder: Path, code: str, *overrides: str, **keys: Any) -> str:
    with pytest.raises(JobError) as error:
        job_with(folder, code, *overrides, **keys)
    return str(error.value)


def samplers(loaded: LoadedJob, steps: range) -> list[str]:
    """Who samples all of each iteration, in the plan of a run."""
    plan = job_parts.planner(
        loaded.config, "run", Inference("http://127.0.0.1:1", "job/actor", SecretStr("key"))
    )
    allocation = plan.allocation
    rows = [allocation.samplers("train", step, groups=2, siblings=2) for step in steps]
    assert all(len({name for group in row for name in group}) == 1 for row in rows)
    return [row[0][0] for row in rows]


def test_the_schedule_of_the_page_chooses_in_the_plan_of_a_run_and_of_a_resumed_one(tmp_path):
    loaded = job_with(tmp_path, PULSES, name="pulses", window=4)
    assert samplers(loaded, range(1, 9)) == ["actor", "actor", "actor", "fixed"] * 2
    (tmp_path / "job.toml").write_text(dump_job(loaded.config))
    load_plugins([])
    assert samplers(load_job(tmp_path / "job.toml"), range(8, 10)) == ["fixed", "actor"]
    of_default = job_with(tmp_path, PULSES, name="pulses")
    assert samplers(of_default, range(9, 12)) == ["actor", "fixed", "actor"]


def test_the_aggregation_of_the_page_weighs_by_the_roots_of_lengths(tmp_path):
    # roots 1, sqrt(3) and 2, shared by 1, 3 and 4 tokens
    job_with(tmp_path, ROOTS + CHOOSES.format('"actor"'), "training.aggregation=root_length")
    root, total = 3**0.5, 3 + 3**0.5
    found = lists(aggregation("root_length").weights(SEGMENTS, None))
    assert found == [pytest.approx([1 / total] + [1 / (root * total)] * 3), pytest.approx([0.5 / total] * 4)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (CHOOSES.format('"Actor"'), r"Mine\.get_policy_choice\(1\) .* is 'Actor'\. Did you mean 'actor'\?"),
        (CHOOSES.format("None"), r"get_policy_choice\(1\) \(mine\.py:7\) is None; known: actor, fixed"),
        (CHOOSES.format("'fixed' if step < 9 else 0.5"), r"get_policy_choice\(9\) \(mine\.py:7\) is 0\.5"),
        (CHOOSES.format("exit(3)"), r"get_policy_choice\(1\) raised SystemExit: 3 \(mine\.py:8\)"),
        (DRAWS.format("1.5"), r"Mine\.alpha_at\(1\) \(mine\.py:7\) is 1\.5; alpha is a probability"),
        (DRAWS.format("-1e-9"), "is -1e-09; alpha is a probability"),
        (DRAWS.format("float('nan')"), "is nan; alpha is a probability"),
        (DRAWS.format("'0.5'"), "is '0.5'; alpha is a probability, a number"),
        (DRAWS.format("random.random()"), "answers otherwise when it is asked again: in step 1 alpha was "),
        (
            CHOOSES.format("setattr(self, 'n', getattr(self, 'n', 0) + 1) or ('actor', 'fixed')[self.n > 5]"),
            "answers otherwise when it is asked again: in step 1 alpha was 1 and 0",
        ),
        (
            CHOOSES.replace("    def", "    def __init__(self): raise ValueError('no')\n    def").format(0),
            r"Mine\(\.\.\.\) raised ValueError: no \(mine\.py:7\)",
        ),
    ],
)
def test_an_answer_that_cannot_be_taken_is_refused_before_anything_is_played(tmp_path, code, words):
    told = refusal(tmp_path, code)
    assert told.startswith("job.toml: rollout_allocation_schedule.type is 'mine'")
    assert re.search(words, told)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (HEAD + '@schedule("mine")\ndef mine(step): ...', "no class with the method get_policy_choice(step)"),
        (HEAD + '@schedule("mine")\nclass Mine(DrawnSchedule): ...', "the method alpha_at(step)"),
        (HEAD + '@schedule("mine")\nclass Mine(RolloutAllocationSchedule): ...', "get_policy_choice(step)"),
        (CHOOSES.replace("def", "async def").format(0), "write def without async"),
        (WEIGHS.format(', over="pass"', ONES), "'mine' has over = 'pass'; known: iteration, plan, step"),
        (CHOOSES.format(0) + "class Other(Mine): ...\ndel Mine", "marks nothing with"),
        (HEAD + "@schedule(3)\nclass Mine(ConstantSchedule): ...", "'3' is no name"),
    ],
)
def test_a_class_or_function_that_cannot_be_taken_is_refused_with_its_file(tmp_path, code, words):
    told = refusal(tmp_path, code)
    assert words in told and told.startswith("job.toml: job.trainer_plugins") and "mine.py" in told


def test_an_argument_that_the_table_lacks_stands_in_a_table_of_the_schedule_s_name(tmp_path):
    code = CHOOSES.replace("    def", "    def __init__(self, last: int): self.last = last\n    def")
    job = {**JOB, "rollout_allocation_schedule": {"type": "mine"}}
    (tmp_path / "mine.py").write_text(code.format("'fixed' if step > self.last else 'actor'"))
    job["job"] = {"trainer_plugins": [str(tmp_path / "mine.py")]}
    with pytest.raises(JobError, match=r"rollout_allocation_schedule\.mine\.last is required"):
        parse_job(job, where="job.toml")
    job["rollout_allocation_schedule"]["mine"] = {"last": 2}
    assert samplers(parse_job(job, where="job.toml"), range(1, 5)) == ["actor", "actor", "fixed", "fixed"]


def test_arguments_of_a_schedule_are_its_keys_in_whatever_order_it_is_decorated(tmp_path):
    body = "class Mine(DrawnSchedule):\n    alpha_0: float\n    beta: float = 0.5\n"
    body += "    def alpha_at(self, step): return self.alpha_0 if step < 3 else self.beta\n"
    for marks in (
        '@schedule("mine")\n@dataclass(frozen=True)\n',
        '@dataclass(frozen=True)\n@schedule("mine")\n',
    ):
        code = HEAD + marks + body
        assert "rollout_allocation_schedule.alpha_0 is required with type = 'mine'" in refusal(tmp_path, code)
        assert "gamma is not read by" in refusal(tmp_path, code, alpha_0=1.0, gamma=1.0)
        loaded = job_with(tmp_path, code, alpha_0=1.0, beta=0.0)
        assert samplers(loaded, range(1, 5)) == ["actor", "actor", "fixed", "fixed"]
        assert not [line for line in loaded.warnings if "in every iteration" in line], "alpha falls"


def test_a_schedule_may_take_the_seed_and_look_back(tmp_path):
    code = CHOOSES.replace(
        "    def", "    def __init__(self, seed, history): self.n = seed + len(history)\n    def"
    )
    loaded = job_with(tmp_path, code.format("('actor', 'fixed')[self.n % 2]"), "job.seed=3")
    assert samplers(loaded, range(1, 3)) == ["fixed", "fixed"]
    assert "type = 'mine' with training.max_staleness" in refusal(
        tmp_path, code.format("'actor'"), "training.max_staleness=1"
    )


def test_a_choice_of_its_own_goes_before_what_a_base_class_would_draw(tmp_path):
    code = HEAD + (
        '@schedule("mine")\nclass Mine(ConstantSchedule):\n    def get_policy_choice(self, step):\n'
        "        return 'fixed' if step < 3 else super().get_policy_choice(step)\n"
    )
    assert samplers(job_with(tmp_path, code, alpha=1.0), range(1, 5)) == ["fixed", "fixed", "actor", "actor"]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (f"{ONES}[1:]", "returned 1 rows for 2 segments"),
        ("[[1.0]] * 2", "returned weights of shape (1,) for a segment of 4 sampled tokens, rollout a"),
        (ONES, "sum to 8; with over = 'step' they sum to 1. Did you mean over = 'plan'"),
        ("[[0.25] * 4, [0.25, -0.25, 0, 0]]", "returned the weight -0.25, rollout b"),
        ("[[0.25] * 4, [float('nan')] * 4]", "returned the weight nan, rollout b"),
        ("None", "raised TypeError: 'NoneType' object is not iterable (mine.py:"),
        ("exit(3)", "raised SystemExit: 3 (mine.py:"),
    ],
)
def test_wrong_weights_are_never_learned_from(tmp_path, result, words):
    job_with(tmp_path, WEIGHS.format("", result) + CHOOSES[len(HEAD) :].format("'actor'"))
    with pytest.raises(JobError) as error:
        aggregation("mine").weights(SEGMENTS, None)
    assert words in str(error.value) and "'mine'" in str(error.value) and "mine.py:" in str(error.value)


def test_weights_over_the_plan_have_any_sum_and_read_the_planned_tokens(tmp_path):
    code = WEIGHS.format(', over="plan"', ONES) + CHOOSES[len(HEAD) :].format("'actor'")
    loaded = job_with(tmp_path, code, "training.aggregation=mine", "training.constant_tokens=7")
    assert lists(aggregation("mine").weights(SEGMENTS, None)) == [[1.0] * 4] * 2
    assert loaded.config.training.constant_tokens == 7
    with pytest.raises(BatchError):
        aggregation("mine").weights([make_segment("a", (1,), [-1], (0.0,))], None)


def test_unknown_names_are_told_those_of_the_file_too(tmp_path):
    code = WEIGHS.format("", ONES) + CHOOSES[len(HEAD) :].format("'actor'")
    told = refusal(tmp_path, code, name="mines")
    assert re.search("type is 'mines'. Did you mean 'mine'. Known: .*linear", told)
    told = refusal(tmp_path, code, "training.aggregation=mines")
    assert re.search("aggregation is 'mines'. Did you mean 'mine'. Known: .*token_mean", told)


def test_who_looks_at_a_job_asks_no_schedule_of_a_package_either(install):
    points = "[turnwise.schedules]\nmine = of_pulses:Mine\n[turnwise.aggregations]\nmine = of_pulses:mine\n"
    code = WEIGHS.format("", "[]") + CHOOSES[len(HEAD) :].format("'fixed' if step > 9 or 1 // self.x else 0")
    install("of_pulses", code.replace("    def", "    x = 1\n    def"), points)
    job = {**JOB, "rollout_allocation_schedule": {"type": "mine"}}
    loaded = parse_job(job, where="job.toml", overrides=["training.aggregation=mine"])
    assert samplers(loaded, range(1, 3)) == ["fixed", "fixed"]
    assert "mine" in AGGREGATIONS
    sys.modules["of_pulses"].Mine.x = 0
    with pytest.raises(JobError, match=r"get_policy_choice\(1\) raised ZeroDivisionError"):
        parse_job(job, where="job.toml")
    assert parse_job(job, where="job.toml", runs_plugins=False).config.rollout_allocation_schedule
