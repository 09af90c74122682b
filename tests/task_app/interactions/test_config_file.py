"""The operator's interaction file: the published YAML, the same as TOML, and what is wrong with one."""

import sys
import textwrap

import pytest
from structlog.testing import capture_logs

from service_kit.errors import SettingsError
from task_app.interactions import gsm8k
from task_app.interactions.config_file import STAND_INS, load_interactions, offer_stand_ins
from task_app.interactions.gsm8k import compute_score
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


def test_a_published_class_in_the_folder_of_the_file_is_loaded_unmodified(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "theirs_5.py").write_text(texts.PUBLISHED_CLASS, encoding="utf-8")
    file = 'interaction:\n  - class_name: "theirs_5.Gsm8kInteraction"\n    config: {}\n'
    entry = load(tmp_path / "a.yaml", file)["gsm8k"]
    assert issubclass(entry.kind, BaseInteraction)
    assert entry.kind.__module__ == "theirs_5"
    assert sys.modules["theirs_5"].gsm8k.compute_score is compute_score


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
    with capture_logs() as lines:
        entry = load(
            tmp_path / "a.yaml", 'interaction: [{class_name: "verl.interactions.base.BaseInteraction"}]'
        )
    stub = entry["base"].build()
    instance_id = await stub.start_interaction()
    assert await stub.generate_response(instance_id, []) == (
        False, "Your current result seems acceptable.", 0.8, {},
    )  # fmt: skip
    assert (await stub.calculate_score(instance_id), await stub.finalize_interaction(instance_id)) == (
        0.0,
        None,
    )
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
        ("class_name: Alone", "FILE: interaction.0.class_name: String should match pattern"),
        ("config: {}", "FILE: interaction.0.class_name: Field required"),
        (f"{{class_name: {USERS}.Noted, nam: 1}}", "unknown key 'nam'. Did you mean 'name'?"),
        (f"{{class_name: {USERS}.Noted, config: 7}}", "interaction.0.config: Input should be a valid dict"),
        (f"{{class_name: {USERS}.Noted, name: ''}}", "interaction.0.name: String should have at least 1"),
        (f"{{class_name: {USERS}.Noted, name: a, name: b}}", "'name' is given twice"),
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


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot be read: No such file or directory$"):
        load_interactions(tmp_path / "none.yaml", Settings())


def test_a_name_given_twice_is_refused(tmp_path):
    twice = f"interaction: [{{class_name: {USERS}.Noted}}, {{class_name: {USERS}.Waits, name: noted}}]"
    assert refused(tmp_path / "a.yaml", twice) == (
        "FILE: interaction.1: the name 'noted' is taken; give each entry a name of its own"
    )


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        (
            "half.Half",
            "from verl.interactions.base import BaseInteraction\n1 / 0\n",
            "FILE: interaction.0.class_name 'half.Half' raised ZeroDivisionError: division by zero"
            " (half.py:2)",
        ),
        (
            "bare.Interaction",
            "from task_app.protocols import BaseInteraction\nclass Interaction(BaseInteraction):\n    pass\n",
            "FILE: interaction.0: class 'bare.Interaction' gives no default name; set name for this entry",
        ),
    ],
)
def test_a_module_that_fails_or_gives_no_name_is_told(tmp_path, monkeypatch, name, code, told):
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = name.partition(".")[0]
    (tmp_path / f"{module}.py").write_text(code)
    assert refused(tmp_path / "a.yaml", f"interaction: [{{class_name: {name}}}]") == told
    assert "half" not in sys.modules, "it is forgotten, so that a mended file is imported"
