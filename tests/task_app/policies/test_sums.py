"""The teacher of sums: every row of the repository's data set, and its slips."""

import json
import re
from pathlib import Path

import pytest

from shared_schemas.messages import Message
from task_app.policies.sums import SumsTeacher, SumsTeacherConfig, solve
from task_app.protocols import PolicyObservation

DATA = Path(__file__).parents[3] / "configs/data"


@pytest.mark.parametrize("name", ["arithmetic.jsonl", "short_sums.jsonl"])
def test_every_row_of_the_data_sets_is_worked_out_as_it_stands_there(name):
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert solve(row["question"]) == row["answer"]


@pytest.mark.parametrize(
    ("slip", "answer"),
    [(0, "3 * 3 = 9\n9 - 5 = 4\n#### 4"), (-2, "3 * 3 = 9\n9 - 5 = 2\n#### 2"), (-9, None)],
)
def test_a_slip_is_one_of_the_last_step_and_never_below_0(slip, answer):
    question = "Gus has 3 nails. Gus triples them. Gus gives away 5. How many nails does Gus have now?"
    assert solve(question, slip=slip) == (answer or "3 * 3 = 9\n9 - 5 = 0\n#### 0")


async def test_it_is_right_as_often_as_it_is_asked_to_be_and_the_same_for_a_seed():
    seen = PolicyObservation((Message(role="user", content="Ada has 4 plums. Ada finds 3 more."),), {})

    async def answers(seed):
        teacher = SumsTeacher(SumsTeacherConfig(right=0.7, seed=seed))
        return [(await teacher.get_action(seen))[0]["content"] for _ in range(400)]

    found = await answers(3)
    assert found == await answers(3)
    right = sum(text.endswith("#### 7") for text in found) / len(found)
    assert right == pytest.approx(0.7, abs=0.07)
    numbers = {int(re.findall(r"#### (\d+)", text)[0]) for text in found}
    assert numbers == {5, 6, 7, 8, 9}


def test_a_text_that_doubles_ten_thousands_of_times_is_worked_out_from_its_beginning():
    lines = solve("Ada has 1 plum. " + "Ada doubles them. " * 50_000).splitlines()
    assert (lines[0], lines[-1]) == ("1 * 2 = 2", f"#### {2**99}")
    assert solve("Ada has " + "9" * 5_000 + " plums.") == "#### 0"
