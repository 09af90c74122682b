"""The operator's interaction file, and grade-school maths, the class that the published file names."""

import csv
import sys
import textwrap
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service_kit.errors import SettingsError
from task_app.errors import InteractionFailed
from task_app.interactions import gsm8k
from task_app.interactions.config_file import STAND_INS, load_interactions, offer_stand_ins
from task_app.interactions.gsm8k import RIGHT, WRONG, Gsm8kInteraction, compute_score, extract_solution
from task_app.protocols import BaseInteraction
from task_app.settings import Settings
from tests.task_app.interactions import published_gsm8k_texts as texts
from tests.task_app.interactions.opening import interactions, said

USERS = "tests.task_app.interactions.users"


def load(path, text):
    path.write_text(text, encoding="utf-8")
    return load_interactions(path, Settings())


def refused(path, text):
    with pytest.raises(SettingsError) as refusal:
        load(path, text)
    return refusal.value.detail.replace(str(path), "FILE")


@pytest.fixture
def no_verl(monkeypatch):
    """As in a new process: nothing of verl has been imported, of ours or of theirs."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]

    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if one is not STAND_INS])
    forget()
    yield
    forget()


def test_the_published_file_names_our_class_where_theirs_is_not_installed(tmp_path):
    entries = load(tmp_path / "a.yaml", texts.PUBLISHED_YAML)
    assert {name: entry.kind for name, entry in entries.items()} == {"gsm8k": gsm8k.Gsm8kInteraction}


LATE = """
    class LateInteraction:
        def __init__(self, config):
            pass

        async def start_interaction(self, instance_id=None, **kwargs):
            return instance_id

        async def generate_response(self, instance_id, messages, **kwargs):
            from verl.utils.reward_score import gsm8k
            score = gsm8k.compute_score(messages[-1]["content"], "42")
            return True, "", score, {}

        async def calculate_score(self, instance_id, **kwargs):
            from verl.interactions.base import BaseInteraction
            return float(issubclass(BaseInteraction, object))

        async def finalize_interaction(self, instance_id, **kwargs):
            pass
"""


async def test_a_class_that_imports_within_a_method_finds_ours_when_it_is_called(
    tmp_path, monkeypatch, no_verl
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "late.py").write_text(textwrap.dedent(LATE), encoding="utf-8")
    kind = load(tmp_path / "a.yaml", "interaction: [{class_name: late.LateInteraction}]")["late"].kind
    async with interactions(kind).open(None, {}, rollout_id="r") as live:
        assert (await live.respond(said("#### 42"))).score == 1.0
        assert await live.score() == 1.0


async def test_the_base_class_answers_as_the_published_one_does_and_the_log_says_that_it_is_no_user(tmp_path):
    file = "interaction: [{class_name: verl.interactions.base.BaseInteraction}]"
    with capture_logs() as lines:
        stub = load(tmp_path / "a.yaml", file)["base"].build()
    one = await stub.start_interaction()
    answer = await stub.generate_response(one, [])
    assert answer == (False, "Your current result seems acceptable.", 0.8, {})
    assert (await stub.calculate_score(one), await stub.finalize_interaction(one)) == (0.0, None)
    (line,) = [line for line in lines if line["log_level"] == "warning"]
    assert line["event"] == "interaction_without_an_answer_of_its_own"
    assert "scores every answer 0.8" in line["detail"]


def test_an_installed_verl_wins_module_by_module(tmp_path, monkeypatch, no_verl):
    # a newer release: it has the scores still, and no interactions any more
    scores = tmp_path / "verl/utils/reward_score"
    scores.mkdir(parents=True)
    for folder in (tmp_path / "verl", tmp_path / "verl/utils", scores):
        (folder / "__init__.py").touch()
    (scores / "gsm8k.py").write_text("compute_score = 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    offer_stand_ins()
    from verl.interactions.base import BaseInteraction as found
    from verl.utils.reward_score import gsm8k as score

    assert (found, score.compute_score) == (BaseInteraction, "theirs")
    with pytest.raises(ModuleNotFoundError):
        import verl.trainer  # noqa: F401


def test_yaml_and_toml_say_the_same(tmp_path):
    yaml = f"""
        interaction:
          - {{class_name: {USERS}.Noted, config: {{depth: {{a: [1, x]}}}}}}
          - {{class_name: {USERS}.Noted, name: other}}
    """
    toml = f"""
        [[interaction]]
        class_name = "{USERS}.Noted"
        [interaction.config]
        depth = {{a = [1, "x"]}}
        [[interaction]]
        class_name = "{USERS}.Noted"
        name = "other"
    """
    entries = load(tmp_path / "a.yaml", yaml)
    assert entries == load(tmp_path / "b.toml", toml)
    assert list(entries) == ["noted", "other"]
    assert entries["noted"].build().config == {"depth": {"a": [1, "x"]}, "name": "noted"}
    assert entries["noted"].build().name == "noted"


def test_two_objects_of_an_entry_share_no_config(tmp_path):
    yaml = f"interaction: [{{class_name: {USERS}.Noted, config: {{list: []}}}}]"
    entry = load(tmp_path / "a.yaml", yaml)["noted"]
    entry.build().config["list"].append(1)
    assert entry.build().config["list"] == []


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("class_name: no_such.file.It", "FILE: interaction.0.class_name 'no_such.file.It': No module named "
         "'no_such'; it is imported from what is installed, or from the folder of this file"),
        (f"class_name: {USERS}.Unknown", f"module '{USERS}' has no 'Unknown'"),
        (f"class_name: {USERS}.a_function", "is no class but function"),
        (f"class_name: {USERS}.NoMethods", "has no start_interaction; derive it from BaseInteraction"),
        (f"class_name: {USERS}.NoObject", "NoObject(config) raised KeyError: 'thing'"),
        ("class_name: a.Interaction", "FILE: interaction.0: class 'a.Interaction' gives no default name; set "
         "name for this entry"),
        ("class_name: Alone", "FILE: interaction.0.class_name: String should match pattern"),
        ("config: {}", "FILE: interaction.0.class_name: Field required"),
        (f"{{class_name: {USERS}.Noted, nam: 1}}", "unknown key 'nam'. Did you mean 'name'?"),
        (f"{{class_name: {USERS}.Noted, config: 7}}", "interaction.0.config: Input should be a valid dict"),
        (f"{{class_name: {USERS}.Noted, name: ''}}", "interaction.0.name: String should have at least 1"),
        (f"{{class_name: {USERS}.Noted, name: a, name: b}}", "'name' is given twice"),
        (f"{{class_name: {USERS}.Noted}}\n  - {{class_name: {USERS}.Waits, name: noted}}",
         "FILE: interaction.1: the name 'noted' is taken; give each entry a name of its own"),
        (f"{{class_name: {USERS}.Noted, config: {{key: '${{oc.env:X}}'}}}}",
         "interaction.0.config.key is '${oc.env:X}'; write the value itself"),
        ("{class_name: task_app.interactions.gsm8k.Gsm8kInteraction, config: {method: strikt}}",
         "FILE: interaction.0: config.method: Input should be 'strict' or 'flexible'; found 'strikt'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_entry_is_one_sentence_with_its_place(tmp_path, row, told):
    assert told in refused(tmp_path / "a.yaml", f"interaction:\n  - {row}\n")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.yaml", "interaction: []", "FILE: interaction: has 0 elements; at least 1 is needed"),
        ("a.yaml", "", "FILE: "),
        ("a.yaml", "- 1", "FILE: "),
        ("a.yaml", "interactions: []", "unknown key 'interactions'. Did you mean 'interaction'?"),
        ("a.yaml", "interaction: [", "FILE is no YAML: "),
        ("a.toml", "interaction = ", "FILE is no TOML: "),
        ("a.json", "{}", "--interactions FILE: the name must end in .yaml, .yml, .toml"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path, name, text, told):
    assert told in refused(tmp_path / name, text)
    with pytest.raises(SettingsError, match=r"No such file or directory$"):
        load_interactions(tmp_path / "none.yaml", Settings())


def test_a_module_that_fails_is_told_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "half.py").write_text("import math\n1 / 0\n")
    told = "'half.Half' raised ZeroDivisionError: division by zero (half.py:2)"
    found = refused(tmp_path / "a.yaml", "interaction: [{class_name: half.Half}]")
    assert found == f"FILE: interaction.0.class_name {told}"
    assert "half" not in sys.modules, "a mended file is imported"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 42", "42", "42"),
        ("#### 1,000", "1000", "1000"),
        ("#### $1,000.50", "1000.50", "1000.50"),
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
        with pytest.raises(ValueError, match="ground_truth"):
            compute_score(answer, case["truth"], case["method"])
    else:
        right = float(case["right"].partition(",")[0])
        assert compute_score(answer, case["truth"], case["method"]) == right


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="'lax'; known: strict, flexible"):
        compute_score("#### 42", "42", method="lax")


async def test_the_last_assistant_message_is_scored_and_a_right_one_ends_the_episode():
    room = interactions(Gsm8kInteraction)
    async with room.open(None, {"ground_truth": "42"}, rollout_id="r") as live:
        wrong = await live.respond(said("#### 41"))
        right = await live.respond(said("#### 41", "#### 42"))
        # the question holds 6 and 7, and the last user message is no answer
        again = await live.respond([*said("#### 42"), *said()])
        none = [(await live.respond(messages)).score for messages in ([], said(), said(""))]
    assert (wrong.should_terminate, wrong.response, wrong.score) == (False, WRONG, 0.0)
    assert (right.should_terminate, right.response, right.score) == (True, RIGHT, 1.0)
    assert (again.score, none) == (1.0, [0.0] * 3)


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
    reply = await interaction.generate_response(instance_id, messages)
    assert reply == (score == 1.0, RIGHT if score else WRONG, score, {})
    assert interaction._instance_dict[instance_id]["response"] == kept
    await interaction.finalize_interaction(instance_id)


async def test_the_config_says_what_answers_are_worth():
    room = interactions(Gsm8kInteraction, config={"method": "flexible", "format_score": 0.25, "score": 0.5})
    async with room.open(None, {"ground_truth": 42}, rollout_id="r") as live:
        wrong, right = await live.respond(said("41")), await live.respond(said("it is 42"))
        assert await live.score() == 0.5
    assert [(one.should_terminate, one.score) for one in (wrong, right)] == [(False, 0.25), (True, 0.5)]


@pytest.mark.parametrize(
    "kwargs", [{}, {"ground_truth": None}, {"ground_truth": ["42"]}, {"ground_truth": "42 apples"}]
)
async def test_a_row_without_the_answer_fails_and_is_never_a_score_of_0(kwargs):
    with pytest.raises(InteractionFailed, match="ground_truth") as failed:
        async with interactions(Gsm8kInteraction).open(None, kwargs, rollout_id="r"):
            raise AssertionError("it started")
    assert "42" not in failed.value.detail, "errors are logged and answered: the answer stands in none"


async def test_the_row_comes_before_the_ground_truth_of_the_request():
    room = interactions(Gsm8kInteraction)
    async with room.open(None, {"ground_truth": "1"}, rollout_id="r", ground_truth="42") as live:
        assert (await live.respond(said("#### 1"))).score == 1.0
    async with room.open(None, {}, rollout_id="r", ground_truth="42") as live:
        assert (await live.respond(said("#### 42"))).score == 1.0


# The scripts of verl.md 1.3; tests/task_app/test_conversation.py has ours, and limits.
SCRIPTS = [["#### 42"], ["#### 41", "#### 42"], ["#### 41"]]


@pytest.mark.parametrize("answers", SCRIPTS, ids=str)
async def test_the_published_class_scores_every_answer_and_leaves_nothing(answers, tmp_path, monkeypatch):
    kind = published_class(tmp_path, monkeypatch)
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
    kind = load_interactions(file, Settings())["gsm8k"].kind
    assert issubclass(kind, BaseInteraction) and kind.__module__ == "theirs_corrected"
    assert sys.modules["theirs_corrected"].gsm8k.compute_score is compute_score
    return kind
