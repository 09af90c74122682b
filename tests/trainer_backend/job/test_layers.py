"""Several TOML files as one job: what goes over what, and which file an error names."""

from pathlib import Path

import pytest
import tomli

from trainer_backend.errors import JobError
from trainer_backend.job.load import load_job, text_to_send
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.rundir.layout import create_run
from trainer_backend.rundir.new_job import load_new_job

BASE = """
[model]
preset = "tiny-0.3m"
[rollout]
env_config = { text = "compact", max_actions = 4 }
[training]
group_size = 4
learning_rate = 1e-3
[evaluation]
seeds = [1, 2, 3]
"""


@pytest.fixture
def layered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Load these texts, laid over one another, from base.toml, a.toml, b.toml in the working directory."""
    monkeypatch.chdir(tmp_path)

    def load(*texts: str, overrides: tuple[str, ...] = ()):
        names = [Path(name) for name in ("base.toml", "a.toml", "b.toml")[: len(texts)]]
        for name, text in zip(names, texts, strict=True):
            name.write_text(text)
        return load_job(names, overrides).config

    return load


def refusal(layered, *texts: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(JobError) as caught:
        layered(*texts, overrides=overrides)
    return str(caught.value)


def test_later_files_go_over_earlier_ones_key_by_key_and_set_over_all(layered):
    job = layered(
        BASE,
        "[training]\ngroup_size = 8\n[rollout]\nenv_config = { max_actions = 2 }",
        "[training]\ngroup_size = 16\nupdate_passes = 3",
        overrides=("training.update_passes=1",),
    )
    assert (job.training.group_size, job.training.learning_rate, job.training.update_passes) == (16, 1e-3, 1)
    assert job.rollout.env_config == {"text": "compact", "max_actions": 2}
    assert layered(BASE, "[evaluation]\nseeds = [9]").evaluation.seeds == (9,), "a list replaces a list"


def test_a_job_has_its_first_file_s_name_unless_one_names_it(layered):
    assert layered(BASE, "").job.name == "base"
    assert layered(BASE, '[job]\nname = "mine"').job.name == "mine"
    assert layered(BASE, overrides=("job.name=other",)).job.name == "other"
    spaced = Path("my job.toml")
    spaced.write_text(BASE)
    assert load_job(spaced).config.job.name == "job", "a file's name that is no job's leaves the default"


def test_a_posted_job_has_its_file_s_name_too(tmp_path: Path):
    path = tmp_path / "my.toml"
    path.write_text(BASE)
    assert tomli.loads(text_to_send([path], ())[0])["job"] == {"name": "my"}
    path.write_text('# as it is\njob.name = "mine"\n')
    assert text_to_send([path], ()) == (path.read_text(), ())


def test_what_a_later_choice_does_not_read_is_not_posted(tmp_path: Path):
    path = tmp_path / "my.toml"
    path.write_text(f'{BASE}\n[algorithm]\nadvantage = "gae"\ngae_lambda = 0.9\n')
    text, (warning,) = text_to_send([path], ["algorithm.advantage=stepwise"])
    assert tomli.loads(text)["algorithm"] == {"advantage": "stepwise"}
    assert "algorithm.gae_lambda is not read by algorithm.advantage = 'stepwise'" in warning


def test_an_empty_table_removes_a_table_inside_a_table_of_the_job_and_no_other(layered):
    base = '[model]\npath = "m"\nchat_template_kwargs = { x = 1 }'
    assert layered(base, overrides=("model.chat_template_kwargs={}",)).model.chat_template_kwargs == {}
    assert layered(base, "[model]").model.chat_template_kwargs == {"x": 1}


def test_set_removes_a_table_of_the_job_as_if_no_file_gave_it(layered):
    base = f"{BASE}\n[warmup]\nepisodes = 9\nepochs = 2"
    assert layered(base, overrides=("warmup={}", "warmup={}")).warmup is None
    assert layered(base, overrides=(" warmup = { }",)) == layered(BASE)
    assert (
        layered(base, overrides=("training={}",)).training.group_size
        == layered(BASE.replace("group_size = 4", "")).training.group_size
    )
    again = layered(base, overrides=("warmup={}", "warmup.epochs=3")).warmup
    assert (again.episodes, again.epochs) == (480, 3)
    assert refusal(layered, base, overrides=("warmpu={}",)).startswith("--set warmpu=…: warmpu is not a key")
    foreign = f"{BASE}\n[vllm]\nx = 1"
    assert layered(foreign, overrides=("vllm={}",)) == layered(BASE)
    fixed = '[[rollout_only]]\nname = "a"\nmodel_path = "a"\n[rollout_allocation_schedule]\nalpha = 0.5'
    for nothing in ("rollout_only={}", "rollout_only=[]"):
        assert layered(BASE, fixed, overrides=(nothing, "rollout_allocation_schedule={}")) == layered(BASE)


def test_set_removes_a_key_which_then_has_its_default_a_switch_from_all_of_its_places(layered):
    fields = TrainingTable.model_fields
    switched = "[rollout]\nstep_rewards_mode = 'env_sparse'"
    job = layered(
        BASE, switched,
        overrides=(
            "training.group_size={}", "training.rewards.step_rewards_mode={}", "rollout.env_config.text={}",
            "training.kl_coef={}",
        ),
    )  # fmt: skip
    assert job.training.group_size == fields["group_size"].default
    assert job.training.step_rewards_mode == fields["step_rewards_mode"].default
    assert job.rollout.env_config == {"max_actions": 4}
    assert layered(BASE, overrides=("model.path={}",)).model.preset == layered(BASE).model.preset
    assert "training.grup_size is not a key" in refusal(layered, BASE, overrides=("training.grup_size={}",))


def test_a_table_that_no_file_has_is_neither_removed_nor_begun_and_that_is_told(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(f"{BASE}\n[warmup]")
    loaded = load_job(path, ("warmup={}", "warmup={}", "lora={}"))
    assert (loaded.config.lora, loaded.config.warmup) == (None, None)
    assert loaded.warnings == (
        "--set lora={} removes a table, and no file has [lora]; to have it with its defaults, set one of its "
        "keys",
    )
    assert text_to_send([path], ("lora={}",))[1] == loaded.warnings


def test_one_model_makes_way_for_another(layered):
    job = layered(BASE, '[model]\npath = "m"\nchat_template_kwargs = { x = 1 }')
    assert (job.model.preset, job.model.path) == (None, Path("m"))
    assert layered(BASE, overrides=("model.path=m",)).model.path == Path("m")
    assert layered(BASE, '[model]\npath = "m"', '[model]\nname = "a/b"').model.name == "a/b"
    both = refusal(layered, BASE, '[model]\npath = "m"\nname = "a/b"')
    assert both.startswith("a.toml: model.name = 'a/b' with model.path = 'm': exactly one of")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[training]\ngroup_sise = 8", "a.toml: training.group_sise is not a key. "),
        ("[training]\ngroup_size = 0", "a.toml: training.group_size is 0: "),
        ("training = 3", "a.toml: training is 3, but it is a table"),
        ('[algorithm]\nadvantage = "grop"', "a.toml: algorithm.advantage is 'grop'. "),
        ("[training]\ngroup_size = 7", "a.toml: rollout.episodes_per_batch (64) must be a multiple of "),
        ("[nonsense]\nx = 1", "a.toml: nonsense is not a key; "),
        ("[data]\nshuffle = true", "a.toml: data.path is required"),
        ("[training\n", "a.toml: not valid TOML: "),
    ],
)
def test_an_error_names_the_file_that_the_key_came_from(layered, text: str, told: str):
    assert refusal(layered, BASE, text).startswith(told)
    assert refusal(layered, BASE, text, "[job]\nseed = 3").startswith(told)


def test_an_error_of_the_first_file_is_not_blamed_on_the_second_and_a_contradiction_on_both(layered):
    wrong, second = BASE.replace("1e-3", "-1.0"), "[training]\ngroup_size = 4"
    assert refusal(layered, wrong, second).startswith("base.toml: training.learning_rate ")
    six = refusal(layered, BASE, "[rollout]\nepisodes_per_batch = 6", second)
    assert six.startswith("a.toml + b.toml: rollout.episodes_per_batch (6)")


def test_a_reward_switch_goes_over_the_same_one_in_another_home(layered):
    homes = {
        "training": "[training]\nstep_rewards_beta = {}",
        "training.rewards": "[training.rewards]\nstep_rewards_beta = {}",
        "rollout": "[rollout]\nstep_rewards_beta = {}",
    }
    for before in homes.values():
        for after in homes.values():
            job = layered(BASE, before.format(0.1), after.format(0.2))
            assert job.training.step_rewards_beta == 0.2
    off = layered(
        BASE, "[training]\nstep_rewards_mode = 'env_sparse'", "[rollout]\nstep_rewards_mode = 'off'"
    )
    assert off.training.step_rewards_mode == "off"


def test_one_file_that_gives_a_switch_twice_is_refused_and_blamed_alone(layered):
    one, both = (
        "[training]\nstep_rewards_beta = 0.1",
        "[training.rewards]\nstep_rewards_beta = 0.2\n[rollout]\nstep_rewards_beta = 0.3",
    )
    told = refusal(layered, BASE, one, both)
    assert told.startswith("b.toml: step_rewards_beta is given twice")
    wrong = refusal(layered, BASE, one, "[rollout]\nstep_rewards_beta = -1")
    assert wrong.startswith("b.toml: training.step_rewards_beta is -1: ")


def test_a_path_is_one_from_the_folder_of_its_file_and_else_from_here(tmp_path: Path, monkeypatch):
    (tmp_path / "here" / "models" / "base").mkdir(parents=True)
    (tmp_path / "there" / "models" / "own").mkdir(parents=True)
    for plugin in ("here/mine.py", "there/mine.py", "there/theirs.py"):
        (tmp_path / plugin).touch()
    job = tmp_path / "there" / "job.toml"
    text = '[model]\npath = "models/{}"\n[services]\ntask_plugins = ["mine.py", "theirs.py", "none.py"]'
    monkeypatch.chdir(tmp_path / "here")

    job.write_text(text.format("own"))
    loaded = load_job(job).config
    assert loaded.model.path == tmp_path / "there" / "models" / "own"
    assert loaded.services.task_plugins == (
        tmp_path / "there" / "mine.py", tmp_path / "there" / "theirs.py", Path("none.py"),
    )  # fmt: skip
    job.write_text(text.format("base"))
    assert load_job(job).config.model.path == tmp_path / "here" / "models" / "base"
    overrides = ('services.task_plugins=["mine.py"]', "model.path=models/own")
    overridden = load_job(job, overrides).config
    assert overridden.services.task_plugins == (tmp_path / "here" / "mine.py",)
    assert overridden.model.path == Path("models/own"), "with --set it is one from here, and nowhere"


def test_what_a_run_wrote_down_is_found_from_any_directory(tmp_path: Path, monkeypatch):
    (tmp_path / "maze").mkdir()
    (tmp_path / "maze" / "plugins.py").touch()
    job = tmp_path / "maze" / "job.toml"
    job.write_text('[model]\npreset = "tiny-0.3m"\n[services]\ntask_plugins = ["plugins.py"]')
    monkeypatch.chdir(tmp_path)
    run = create_run(load_job(Path("maze/job.toml")).config, tmp_path / "runs" / "maze")
    monkeypatch.chdir("/")
    assert run.job().services.task_plugins == (tmp_path / "maze" / "plugins.py",)


def test_a_file_that_is_not_there_is_named(layered, tmp_path: Path):
    (tmp_path / "base.toml").write_text(BASE)
    with pytest.raises(JobError, match=r"^none\.toml: no such file$"):
        load_new_job([Path("base.toml"), Path("none.toml")])
    with pytest.raises(JobError, match="at least one TOML file"):
        load_job([])
