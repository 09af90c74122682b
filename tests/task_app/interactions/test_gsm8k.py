"""Grade-school maths: what counts as an answer, and the scripts that a published loop left unscored."""

import csv
import sys
from pathlib import Path

import pytest

from service_kit.errors import SettingsError
from task_app.errors import InteractionFailed
from task_app.interactions.config_file import load_interactions
from task_app.interactions.gsm8k import RIGHT, WRONG, Gsm8kInteraction, compute_score, extract_solution
from task_app.settings import Settings
from tests.task_app.interactions import published_gsm8k_texts as texts
from tests.task_app.interactions.opening import interactions, said


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 42", "42", "42"),
        ("so 6 x 7.\n#### 42.", "42", "42"),
        ("#### 1,000", "1000", "1000"),
        ("#### $1,000.50", "1000.50", "1000.50"),
        ("#### -3", "-3", "-3"),
        ("#### 41 no, #### 42", "42", "42"),
        ("the answer is 42", None, "42"),
        ("####42", None, "42"),
        ("#### .", None, None),
        ("42 apples, and a dot ...", None, "42"),
        ("", None, None),
        ("#### 42" + "x" * 300, None, None),
    ],
)
def test_an_answer_is_found_at_the_end(text, strict, flexible):
    assert extract_solution(text, "strict") == strict
    assert extract_solution(text, "flexible") == flexible


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("#### 42", "42", 1.0), ("#### 42.0", "42", 1.0), ("#### 42.", "42", 1.0),
        ("#### 1000", "1,000", 1.0),
        ("#### 41", "42", 0.1), ("the answer is 42", "42", 0.0), ("#### 1.2.3", "1.2", 0.1), ("", "42", 0.0),
    ],
)  # fmt: skip
def test_right_wrong_and_no_answer_are_three_scores(text, truth, score):
    found = compute_score(text, truth, format_score=0.1)
    assert found == score
    assert type(found) is float


CASES = [
    *csv.DictReader(
        Path(__file__).with_name("gsm8k.tsv").read_text(encoding="utf-8").splitlines(), delimiter="\t"
    )
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_answers_that_were_once_misread_have_the_right_score(case):
    answer = case["answer"].replace("\\n", "\n")
    if case["right"].startswith("refused"):
        with pytest.raises(ValueError, match=r"ground_truth is a str that is no number"):
            compute_score(answer, case["truth"], case["method"])
    else:
        right = float(case["right"].partition(",")[0])
        assert compute_score(answer, case["truth"], case["method"]) == right


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="method is 'lax'; known: strict, flexible"):
        compute_score("#### 42", "42", method="lax")


async def test_the_last_assistant_message_is_scored_and_a_right_one_ends_the_episode():
    room = interactions(Gsm8kInteraction)
    async with room.open(None, {"ground_truth": "42"}, rollout_id="r") as live:
        wrong = await live.respond(said("#### 41"))
        right = await live.respond(said("#### 41", "#### 42"))
        # the question holds 6 and 7, and the last user message is no answer
        none = await live.respond([*said("#### 42"), *said()])
    assert (wrong.should_terminate, wrong.response, wrong.score) == (False, WRONG, 0.0)
    assert (right.should_terminate, right.response, right.score) == (True, RIGHT, 1.0)
    assert none.score == 1.0


@pytest.mark.parametrize(
    ("method", "answer", "score", "kept"),
    [
        ("flexible", "The answer is 4", 1.0, "#### The answer is 4"),
        ("flexible", "#### 4", 1.0, "#### 4"),
        ("flexible", "It is 4, I mean 5.", 0.0, "#### It is 4, I mean 5."),
        ("strict", "The answer is 4", 0.0, "The answer is 4"),
        ("strict", "4", 0.0, "4"),  # with the prefix it would be right
    ],
)
async def test_an_empty_config_scores_as_source_5_publishes_it(method, answer, score, kept):
    interaction = Gsm8kInteraction({} if method == "flexible" else {"method": method})
    instance_id = await interaction.start_interaction(ground_truth="4")
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": answer}]
    assert await interaction.generate_response(instance_id, messages) == (
        score == 1.0,
        RIGHT if score else WRONG,
        score,
        {},
    )
    assert interaction._instance_dict[instance_id]["response"] == kept
    await interaction.finalize_interaction(instance_id)


async def test_the_config_says_what_answers_are_worth():
    room = interactions(Gsm8kInteraction, config={"method": "flexible", "format_score": 0.25, "score": 0.5})
    async with room.open(None, {"ground_truth": 42}, rollout_id="r") as live:
        wrong, right = await live.respond(said("41")), await live.respond(said("it is 42"))
        assert await live.score() == 0.5
    assert [(one.should_terminate, one.score) for one in (wrong, right)] == [(False, 0.25), (True, 0.5)]


@pytest.mark.parametrize("messages", [[], said(), said("")])
async def test_no_answer_is_worth_nothing(messages):
    async with interactions(Gsm8kInteraction).open(None, {"ground_truth": "42"}, rollout_id="r") as live:
        assert (await live.respond(messages)).score == 0.0


@pytest.mark.parametrize(
    "kwargs", [{}, {"ground_truth": None}, {"ground_truth": ["42"]}, {"ground_truth": "42 apples"}]
)
async def test_a_row_without_the_answer_fails_and_is_never_a_score_of_0(kwargs):
    with pytest.raises(InteractionFailed, match="the answer as a number or text is needed") as failed:
        async with interactions(Gsm8kInteraction).open(None, kwargs, rollout_id="r"):
            raise AssertionError("it started")
    assert "42" not in failed.value.detail, "errors are logged and answered: the answer stands in none"


async def test_the_row_comes_before_the_ground_truth_of_the_request():
    room = interactions(Gsm8kInteraction)
    async with room.open(None, {"ground_truth": "1"}, rollout_id="r", ground_truth="42") as live:
        assert (await live.respond(said("#### 1"))).score == 1.0
    async with room.open(None, {}, rollout_id="r", ground_truth="42") as live:
        assert (await live.respond(said("#### 42"))).score == 1.0


# The scripts of verl.md 1.3 without their limits, which tests/task_app/test_conversation.py has.
SCRIPTS = [["#### 42"], ["#### 41", "#### 42"], ["#### 41"]]


@pytest.mark.parametrize("published", [False, True], ids=["ours", "published"])
@pytest.mark.parametrize("answers", SCRIPTS, ids=str)
async def test_in_every_script_every_answer_is_scored_and_nothing_is_left(
    answers, published, tmp_path, monkeypatch
):
    kind = published_class(tmp_path, monkeypatch) if published else Gsm8kInteraction
    finalised = []
    kept = kind.finalize_interaction

    async def finalise(self, instance_id, **kwargs):
        await kept(self, instance_id, **kwargs)
        finalised.append((instance_id, self._instance_dict))

    observed = type("Observed", (kind,), {"finalize_interaction": finalise})
    found = []
    async with interactions(observed).open(None, {"ground_truth": "42"}, rollout_id="r") as live:
        for count in range(1, len(answers) + 1):
            found.append((await live.respond(said(*answers[:count]))).score)
    assert found == [float(answer == "#### 42") for answer in answers]
    assert len(finalised) == 1 and finalised[0][1] == {}


def published_class(tmp_path, monkeypatch):
    """That of source 5, its one known mistake corrected as its next release did."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "theirs_corrected", raising=False)
    corrected = texts.PUBLISHED_CLASS.replace('item.get("role") == "user"', 'item.get("role") == "assistant"')
    assert corrected != texts.PUBLISHED_CLASS
    (tmp_path / "theirs_corrected.py").write_text(corrected, encoding="utf-8")
    file = tmp_path / "file.yaml"
    file.write_text("interaction: [{class_name: theirs_corrected.Gsm8kInteraction}]", encoding="utf-8")
    return load_interactions(file, Settings())["gsm8k"].kind


def test_a_score_that_is_no_number_is_refused_at_the_start(tmp_path):
    file = tmp_path / "file.yaml"
    name = "task_app.interactions.gsm8k.Gsm8kInteraction"
    file.write_text(f"interaction: [{{class_name: {name}, config: {{score: a, scor: 1}}}}]", encoding="utf-8")
    with pytest.raises(
        SettingsError, match=r"config\.scor: unknown key 'scor'\. Did you mean 'score'\? Known: "
    ):
        load_interactions(file, Settings())
