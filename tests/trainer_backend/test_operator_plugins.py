"""Plug-ins of the operator's in the trainer: named in a job, checked, refused when their file changes."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest
import tomli
import torch

from tests.trainer_backend.jobs.rows import job as posted_row
from tests.trainer_backend.pages.hand_made import FIRST, empty_run, small_run
from tests.trainer_backend.segment_columns import make_segment
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.losses import ClipKeys
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import AdvantageError, JobError, rejected_rollouts
from trainer_backend.evaluation.play import what_to_evaluate
from trainer_backend.job.load import dump_job, load_job, parse_job
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.jobs.data_dir import open_data_dir
from trainer_backend.jobs.posted import validate_job
from trainer_backend.jobs.settings import Bounds
from trainer_backend.learner.behaviour import build_objectives
from trainer_backend.operator_plugins import _load_packages_once, load_packages, load_plugins
from trainer_backend.pages.compare import read_sides
from trainer_backend.pages.report import write_report
from trainer_backend.pages.stored import Frames
from trainer_backend.plugins import aggregation, estimator, policy_loss
from trainer_backend.terminal.check_command import own_choices, whole_job

pytestmark = pytest.mark.usefixtures("own_boards")
OF_THE_PAGE = (Path(__file__).parents[2] / "examples/plugins/medians.py").read_text(encoding="utf-8")
HEAD = (
    "from trainer_backend.core.advantages.episodes import Advantages\n"
    "from trainer_backend.core.advantages.gigpo import GigpoKeys\n"
    "from trainer_backend.core.critic import ByToken\n"
    "from trainer_backend.operator_plugins import estimator, loss\n"
)
MINE = HEAD + '@estimator("mine")\ndef mine(episodes, config):\n    return {}\n'
ONES = "[[1.0] * len(episode.rewards_T) for episode in episodes]"
EPISODES = [EpisodeRewards("a", "g", [1.0, 2.0, 4.0]), EpisodeRewards("b", "g", [0.0, 1.0])]
MODEL = {"model": {"preset": "tiny-0.3m"}}


def job_with(folder: Path, code: str, *overrides: str):
    (folder / "mine.py").write_text(code, encoding="utf-8")
    job = folder / "job.toml"
    if not job.exists():
        job.write_text('[model]\npreset = "tiny-0.3m"\n[job]\ntrainer_plugins = ["mine.py"]\n')
    return load_job(job, overrides).config


def trap(folder: Path) -> str:
    """Code that leaves a file `sprung` where it runs."""
    return f"import pathlib; pathlib.Path({str(folder / 'sprung')!r}).touch()"


def refusal(folder: Path, code: str, *overrides: str) -> str:
    with pytest.raises(JobError) as error:
        job_with(folder, code, *overrides)
    return str(error.value)


def test_the_estimator_of_the_page_subtracts_the_median_of_the_group_at_each_turn(tmp_path):
    # returns-to-go at gamma 0.5: a 3, 4, 4; b 0.5, 1; medians 1.75, 2.5, 4
    assert computed(job_with(tmp_path, OF_THE_PAGE, *CHOSEN)) == [[1.25, 1.5, 0.0], [-1.25, -1.5]]


CHOSEN = ("algorithm.advantage=median_return", "algorithm.loss=spo", "algorithm.gamma=0.5")


def computed(job):
    plug = estimator(job.algorithm.advantage)
    return plug.compute(EPISODES, job.algorithm.read(plug.keys, job.algorithm.advantage)).per_episode


def test_a_key_of_the_plug_s_own_stands_in_a_table_of_its_name(tmp_path):
    job = job_with(tmp_path, OF_THE_PAGE, *CHOSEN, "algorithm.median_return.share=0.0")
    assert computed(job) == [[3.0, 4.0, 4.0], [0.5, 1.0]]
    assert "[algorithm.median_return]" in "\n".join(toml for toml, _ in own_choices(job))
    assert parse_job(tomli.loads(dump_job(job)), where="job.toml").config == job
    for own, words in (
        ("shar=0.0", "algorithm.median_return.shar is not a key. Did you mean 'share'"),
        ("share='a'", "algorithm.median_return.share is 'a'"),
        ("gamma=0.5", "algorithm.median_return.gamma is not a key. Did you mean algorithm.gamma or "),
    ):
        assert words in refusal(tmp_path, OF_THE_PAGE, *CHOSEN, f"algorithm.median_return.{own}")
    assert "algorithm.share is not a key. Did you mean algorithm.median_return.share" in refusal(
        tmp_path, OF_THE_PAGE, "algorithm.share=0.5"
    )
    assert "share = 1.0" in [toml.strip() for toml, _ in whole_job(job_with(tmp_path, OF_THE_PAGE, *CHOSEN))]
    load_plugins([])
    looked_at = parse_job(tomli.loads(dump_job(job)), where="job.toml", runs_plugins=False).config
    assert looked_at.algorithm.own("median_return") == {"share": 0.0}
    told = refusal(tmp_path, OF_THE_PAGE, "algorithm.median_return.share=0.5")
    assert "[algorithm.median_return] is not read by algorithm.advantage = 'stepwise'" in told
    told = refusal(tmp_path, OF_THE_PAGE.replace("share: float = 1.0", "share: float"), *CHOSEN)
    assert "algorithm.median_return.share is required" in told


def test_the_loss_of_the_page_is_its_formula_and_padding_touches_nothing(tmp_path):
    # ratios 2 and 1/2, clip 0.5: 2 * 3 - 3 * 1 = 3, and 0.5 * -4 - 4 * 0.25 = -3; weights 1/2 and 1/4
    job_with(tmp_path, OF_THE_PAGE)
    nan = float("nan")
    logprobs = torch.tensor([0.0, -1.0, nan], requires_grad=True)
    proximal = torch.tensor([0.0, -1.0, nan]) - torch.tensor([2.0, 0.5, 1.0]).log()
    weights = torch.tensor([0.5, 0.25, 0.0])
    found = policy_loss("spo").compute(
        logprobs, proximal, torch.tensor([3.0, -4.0, nan]), weights, ClipKeys(clip_high=0.5)
    )
    assert found.item() == pytest.approx(-(0.5 * 3 + 0.25 * -3))
    found.backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert policy_loss("spo").clips


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("[[0.0] * 3]", "'mine' returned 1 rows for 2 episodes"),
        ("[[0.0] * 3, [0.0] * 3]", "'mine', rollout b: it returned 3 advantages for 2 decisions"),
        ("[[0.0, 0.0, float('nan')], [0.0] * 2]", "the estimator 'mine', rollout a, turn 3: it returned nan"),
        ("exit(3)", "'mine' raised SystemExit: 3 (mine.py:"),
        ("None", "'mine' raised TypeError: 'NoneType' object is not iterable (mine.py:"),
        ("Advantages([[0.0] * 3, [0.0] * 2], {}, {'scale': [[1.0] * 3]})", "1 rows as its part 'scale'"),
        (
            "Advantages([[0.0] * 3, [0.0] * 2], "
            "per_token=[ByToken([[0.0, float('nan')]] * 3), ByToken([[0.0]] * 2)])",
            "the estimator 'mine', rollout a, turn 1: it returned nan by token",
        ),
    ],
)
def test_wrong_credit_is_never_learned_from(tmp_path, result, words):
    job_with(tmp_path, MINE.format(result))
    with pytest.raises(AdvantageError) as error:
        estimator("mine").compute(EPISODES, AlgorithmTable(gamma=1.0))
    assert words in str(error.value)
    assert not rejected_rollouts(error.value), "none of them is at fault"


def test_rows_of_arrays_are_stored_as_lists_of_floats(tmp_path):
    code = "import numpy as np\n" + MINE.format(
        "Advantages([np.ones(len(e.rewards_T), 'f4') for e in episodes])"
    )
    job_with(tmp_path, code)
    found = estimator("mine").compute(EPISODES, AlgorithmTable(gamma=1.0)).per_episode
    assert json.dumps(found) == "[[1.0, 1.0, 1.0], [1.0, 1.0]]"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("lp", r"the loss 'raw' returned \(2,\); a loss is one number"),
        ("1.0", "the loss 'raw' returned a float; return a tensor"),
        ("lp.sum().detach()", "the loss 'raw' has no gradient"),
        ("exit(3)", "the loss 'raw' raised SystemExit: 3"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path, result, words):
    code = f'@loss("raw")\ndef raw(lp, proximal, advantages, weights, config):\n    return {result}\n'
    job_with(tmp_path, HEAD + code)
    with pytest.raises(JobError, match=words):
        policy_loss("raw").compute(
            torch.ones(2, requires_grad=True), *[torch.ones(2)] * 3, ClipKeys(clip_high=0.2)
        )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (MINE.replace('"mine"', '"My est"').format(ONES), "'My est' is no name"),
        (MINE.replace('"mine"', '"mine", takes=["omega"]').format(ONES), "names 'takes' of EstimatorPlug"),
        (MINE.replace('"mine"', '"mine", needs_value="decision"').format(ONES), "'needs_values'?"),
        (MINE.replace('"mine"', '"mine", keys=dict').format(ONES), "a class that derives from EstimatorKeys"),
        (MINE.replace('"mine"', '"mine", needs_values="decsion"').format(ONES), "Did you mean 'decision'?"),
        (MINE.replace('"mine"', '"mine", divides_by_std="no"').format(ONES), "write True or False"),
        (MINE.replace('"mine"', '"mine", values={{"job.seed": 3}}').format(ONES), "algorithm. and training."),
        (MINE.replace("def mine", "async def mine").format(ONES), "write def without async"),
        ("raise SystemExit(3)", "mine.py raised SystemExit: 3"),
        ("x = 1", "marks nothing with @estimator(NAME), @loss(NAME), @aggregation(NAME) or @schedule(NAME)"),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused_with_its_reason(tmp_path, code, words):
    told = refusal(tmp_path, code)
    assert words in told and "job.toml" in told and "mine.py" in told


def test_keys_that_a_plug_in_does_not_read_are_refused_and_those_that_it_takes_are_not(tmp_path):
    code = MINE.replace('"mine"', '"mine", keys=GigpoKeys').format(ONES)
    job_with(tmp_path, code, "algorithm.advantage=mine", "algorithm.omega=0.25")
    told = refusal(tmp_path, code, "algorithm.advantage=mine", "algorithm.gae_lambda=0.5")
    assert "algorithm.gae_lambda is not read by" in told


def test_a_file_with_which_a_run_did_not_begin_is_not_run_until_it_is_named_again(tmp_path):
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_job(job_with(tmp_path, MINE.format(ONES), "algorithm.advantage=mine")))
    (tmp_path / "mine.py").write_text(f"{trap(tmp_path)}\n" + MINE.format(ONES.replace("1.0", "2.0")))
    with pytest.raises(JobError, match=r"mine\.py has changed since the run began"):
        load_job(stored)
    assert not (tmp_path / "sprung").exists()
    load_job(stored, [f"job.trainer_plugins={tmp_path / 'mine.py'}"])
    assert estimator("mine").compute(EPISODES, AlgorithmTable(gamma=1.0)).per_episode[0] == [2.0] * 3


def test_who_looks_at_a_run_runs_none_of_its_code(tmp_path):
    job = job_with(tmp_path, MINE.format(ONES), "algorithm.advantage=mine")
    load_plugins([])
    run = small_run(job, tmp_path / "run")
    (tmp_path / "mine.py").write_text(trap(tmp_path))
    write_report(run)
    read_sides([run.path, empty_run(job, tmp_path / "other").path])
    shown = []
    frames = Frames(lambda services, config, *_: shown.append(config) or {})
    asyncio.run(frames.of(run.path, FIRST[0]))
    assert shown == [job.rollout.env_config]
    loaded, player = what_to_evaluate(run.path, None, Inference("http://127.0.0.1:1", "m", None))
    assert job_parts.planner(loaded.config, "eval", player).evaluation("0")
    (tmp_path / "mine.py").unlink()
    assert run.job() == job
    assert not (tmp_path / "sprung").exists()


def test_each_job_knows_the_names_of_its_own_files_alone(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        job_with(tmp_path / name, MINE.format(ONES), "algorithm.advantage=mine")
    with pytest.raises(JobError, match=r"algorithm\.advantage is 'mine'"):
        parse_job({**MODEL, "algorithm": {"advantage": "mine"}}, where="test")


def test_a_posted_job_runs_no_file_but_the_operators(tmp_path):
    (tmp_path / "runs").mkdir()
    file = tmp_path / "trap.py"
    file.write_text(trap(tmp_path))
    bounds = Bounds(data_dir=tmp_path / "runs", roots=(tmp_path,))
    with pytest.raises(JobError, match="which the service's operator chooses"):
        validate_job({**MODEL, "job": {"trainer_plugins": [str(file)]}}, bounds)
    assert not (tmp_path / "sprung").exists()
    own = tmp_path / "own.py"
    own.write_text(MINE.format(ONES))
    posted = validate_job(
        {**MODEL, "algorithm": {"advantage": "mine"}},
        Bounds(data_dir=tmp_path / "runs", plugins=(own,)),
    )
    assert posted[0].config.job.trainer_plugins == (own,)


def test_what_an_installed_package_marks_is_known_to_every_job(tmp_path, monkeypatch, install):
    metadata = install("ideas", MINE.format(ONES), "[turnwise.estimators]\nmine = ideas:mine\n")
    loaded = parse_job({**MODEL, "algorithm": {"advantage": "mine"}}, where="test")
    assert loaded.config.algorithm.advantage == "mine"
    with pytest.raises(JobError, match=r"marked as algorithm\.advantage = 'mine'; name it equally"):
        other = tmp_path / "other"
        shutil.copytree(metadata, other / metadata.name)
        (other / metadata.name / "entry_points.txt").write_text("[turnwise.losses]\nmine = ideas:mine\n")
        monkeypatch.syspath_prepend(other)
        _load_packages_once.cache_clear()
        load_packages()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(other)])
    (tmp_path / "ideas.py").write_text("mine = len")
    sys.modules.pop("ideas")
    _load_packages_once.cache_clear()
    with pytest.raises(JobError, match=r"ideas, entry point 'mine' .* decorate it with @estimator"):
        load_packages()


def test_a_neighbour_of_the_same_name_in_another_folder_is_refused(tmp_path):
    # Python would take the first one's for both
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights_of_mine.py").write_text("V = 1.0")
    code = "from weights_of_mine import V\n" + MINE.format(ONES)
    job_with(tmp_path / "a", code)
    assert "its neighbour 'weights_of_mine' would be" in refusal(tmp_path / "b", code)


def test_a_posted_job_takes_the_file_as_it_is_and_runs_none_that_was_withdrawn(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(MINE.format(ONES))
    bounds = Bounds(data_dir=tmp_path / "runs", plugins=(own,))
    posted = {**MODEL, "job": {"trainer_plugins_sha256": ["of an earlier run"]}}
    config = dump_job(validate_job(posted, bounds)[0].config)
    own.write_text(trap(tmp_path))
    waiting = posted_row(run_dir=str(bounds.data_dir / "mine"), config=config)
    with open_data_dir(bounds.data_dir, runs_jobs=True, plugins=(own,)) as data:
        assert data.prepare_run(waiting).job().job.trainer_plugins_sha256 == ()
    with (
        open_data_dir(bounds.data_dir, runs_jobs=True) as data,
        pytest.raises(JobError, match=r"the service had .*own\.py, and it has it no more"),
    ):
        data.prepare_run(waiting)
    assert not (tmp_path / "sprung").exists()


def test_a_loss_and_an_aggregation_read_a_table_of_their_own_too(tmp_path):
    code = HEAD + (
        "from trainer_backend.core.keys import Table\n"
        "from trainer_backend.operator_plugins import aggregation\n"
        "class Own(Table):\n    clip_low: float = 0.1\n    power: float = 1.0\n"
        '@loss("mine", keys=Own)\ndef mine(lp, proximal, advantages, weights, keys):\n'
        "    return (lp * keys.power * keys.clip_low).sum()\n"
        '@aggregation("mine", keys=Own)\ndef weigh(segments, keys):\n'
        "    return [[keys.power] for _ in segments]\n"
    )
    chosen = ("algorithm.loss=mine", "training.aggregation=mine", "training.mine.power=3.0")
    job = job_with(tmp_path, code, *chosen, "training.clip_low=0.5")
    objective = build_objectives(job.training, job.algorithm)[ACTOR]
    logprobs = torch.ones(2, requires_grad=True)
    found = objective.loss(logprobs, *[torch.ones(2)] * 3, objective.clip)
    assert found.item() == 2 * 3.0 * 0.5
    plug = aggregation("mine")
    with pytest.raises(JobError, match="weights that sum to 3"):
        plug.weights([make_segment("a", (1, 1), [-1, 0], (0.0,) * 2)], job.training.read(plug.keys, "mine"))


def test_what_its_own_class_refuses_is_told_before_a_run_and_a_later_choice_leaves_its_table_out(tmp_path):
    code = HEAD + (
        "from pydantic import field_validator\n"
        "class Own(GigpoKeys):\n    odd: int = 1\n"
        "    @field_validator('odd')\n    @classmethod\n    def _is_odd(cls, value):\n"
        "        if value % 2 == 0:\n            raise ValueError('it is even')\n        return value\n"
        f'@estimator("mine", keys=Own)\ndef mine(episodes, keys):\n    return {ONES}\n'
    )
    chosen = ("algorithm.advantage=mine", "algorithm.mine.odd=2")
    assert "algorithm.advantage = 'mine': odd: Value error, it is even" in refusal(tmp_path, code, *chosen)
    told = refusal(tmp_path, code.replace('"mine"', '"omega"'), "algorithm.advantage=omega")
    assert "[algorithm] has a key of that name: rename it" in told
    job = tmp_path / "job.toml"
    job.write_text(job.read_text() + '[algorithm]\nadvantage = "mine"\n[algorithm.mine]\nodd = 3\n')
    (tmp_path / "mine.py").write_text(code)
    later = load_job(job, ["algorithm.advantage=grpo"])
    assert later.config.algorithm.own("mine") == {} and "algorithm.mine" in later.left_out


# A name that another plug has already: the refusal says which one.
MARKS = "from trainer_backend.operator_plugins import aggregation, estimator, loss, schedule\n"
TAKEN = MARKS + "@estimator('mine')\ndef mine(*_): return []\n"


def taken(*codes: str, folder: Path) -> str:
    files = [folder / f"{name}.py" for name, _ in zip("ab", codes, strict=False)]
    for file, code in zip(files, codes, strict=True):
        file.write_text(code)
    with pytest.raises(JobError) as refused:
        load_packages()
        load_plugins(files)
    return str(refused.value).removeprefix(f"job.trainer_plugins, {files[-1]}: ")


@pytest.mark.parametrize(
    ("mark", "key"),
    [
        ("@estimator('gae')", "algorithm.advantage = 'gae'"),
        ("@loss('clipped')", "algorithm.loss = 'clipped'"),
        ("@aggregation('token_mean')", "training.aggregation = 'token_mean'"),
        ("@schedule('linear')", "rollout_allocation_schedule.type = 'linear'"),
    ],
)
def test_a_name_is_taken_by_a_built_in_plug(mark, key, tmp_path):
    code = f"{MARKS}{mark}\nclass Mine:\n    def get_policy_choice(self, step): return 'actor'\n"
    told = taken(code, folder=tmp_path)
    assert told == f"{key} is there already (built in); choose another name"


SENTENCE = "algorithm.advantage = 'mine' is there already (of {}); choose another name"


def test_a_name_is_taken_by_another_file_or_by_the_same_one(tmp_path):
    assert taken(TAKEN, TAKEN, folder=tmp_path) == SENTENCE.format(tmp_path / "a.py")
    load_plugins([])
    twice = TAKEN + "@estimator('mine')\ndef again(*_): return []\n"
    assert taken(twice, folder=tmp_path) == SENTENCE.format(tmp_path / "a.py")


def test_a_name_is_taken_by_a_package(tmp_path, install):
    install("of_names", TAKEN, "[turnwise.estimators]\nmine = of_names:mine\n")
    assert taken(TAKEN, folder=tmp_path) == SENTENCE.format(
        "of_names, entry point 'mine' of 'turnwise.estimators'"
    )
