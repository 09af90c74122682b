"""`turnwise init`: the file loads as it stands, tells every default truly, and overwrites nothing.

A fresh small model finds in it what it needs to learn, in every environment that the command knows.
"""

import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import TASK_APP_KEY, task_app
from tests.task_app.environments.foreign.processes import served
from tests.task_app.environments.foreign.test_bad_servers import openenv, paid, says
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.trial import try_job
from trainer_backend.credit.rewards import Rewards
from trainer_backend.errors import JobError
from trainer_backend.job.load import load_job, parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.rundir.new_job import load_new_job
from trainer_backend.terminal.environment_jobs import JOBS
from trainer_backend.terminal.templates import COMMON, Choices, job_text, toml_value, write_job

ROOT = Path(__file__).parents[2]
# The config of each environment with which a fresh small model is known to learn.
CONFIGS = {
    "babyai": "babyai",
    "crafter": "crafter_cpu",
    "dialogue": "gsm8k_interaction",
    "documents": "documents_statelm",
    "orders": "orders",
    "sokoban": "sokoban",
    "gymnasium:FrozenLake-v1": "frozen_lake",
}
# Environments of every kind that the command knows, and one of a package, which `installed` stands for.
FRESH = [
    *CONFIGS,
    "gymnasium:CartPole-v1",
    "mcp:http://127.0.0.1:9/mcp",
    "openenv:http://127.0.0.1:9",
    "maze",
]
TRAINED = [*FRESH, "agent:riddle", "reasoning_gym:chain_sum", "textarena:Sudoku-v0", "verifiers:gsm8k_v1"]
CHOICES = [
    *(Choices(env) for env in FRESH),
    *(Choices(env, model="Qwen/Qwen3-0.6B") for env in TRAINED),
    Choices("maze", preset="tiny-0.8m"),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch):
    """Let packages with the environments `maze` and `lake` be installed."""
    names = frozenset({*CONFIGS, "maze", "lake"})
    monkeypatch.setattr("trainer_backend.terminal.templates.environment_names", lambda: names)


# By environment.
UNKNOWN = {
    "mazee": "Did you mean 'maze'?",
    "gymnasium": "Did you mean 'gymnasium:'?",
    "gym:CartPole-v1": "Did you mean 'gymnasium:'? Known: agent:, ",
    "BabyAI": "Did you mean 'babyai'?",
    "crafter:": "Did you mean 'crafter'?",
    "gymnasium:": "after the colon stands which one",
    "x:y": "set rollout.env_name",
    "": "--env is ''",
}


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        *((Choices(env, model=model), told) for env, told in UNKNOWN.items() for model in (None, "a/b")),
        (Choices(preset="tiny-0.8m", model="a/b"), "give --preset tiny-0.8m or --model a/b, not both"),
        (Choices(preset="tiny"), "turnwise init: model.preset is 'tiny'. Did you mean "),
        (Choices(model="/no/such/folder"), "for a folder, did you mean model.path"),
        (Choices(env="verifiers:gsm8k_v1"), "a fresh small model how to answer 'verifiers:gsm8k_v1'"),
    ],
)
def test_what_makes_no_job_is_refused_and_nothing_is_written(tmp_path: Path, choices: Choices, told: str):
    with pytest.raises(JobError, match=re.escape(told)):
        write_job(tmp_path / "job.toml", choices)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("choices", CHOICES)
def test_it_loads_as_it_stands_without_a_warning_and_has_every_table_and_a_comment_for_each_key(
    tmp_path: Path, choices: Choices
):
    written = write_job(tmp_path / "job.toml", choices)
    again = load_job(tmp_path / "job.toml")
    assert (again, again.warnings) == (written, ())
    assert again.config.rollout.env_name == choices.env
    training = again.config.training
    assert (training.step_rewards_enabled, training.step_rewards_mode != "off") == (True, True)
    lines = (tmp_path / "job.toml").read_text().splitlines()
    for name, field in JobConfig.model_fields.items():
        assert f"[{name}]" in lines or f"#[{name}]" in lines
        assert set(COMMON.get(name, ())) <= set(table_model(field).model_fields)
    for before, line in pairwise(lines):
        if re.match(r"#?[a-z_]+ =", line):
            assert before.startswith("# "), f"{line} has no comment"
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("choices", CHOICES)
def test_a_key_behind_a_hash_has_its_default(choices: Choices):
    text = job_text(choices.values())
    if 'critic = "own"' in text:  # which goes with no adapters
        text = re.sub(r"(?ms)^#\[lora\].*?(?=^#?\[)", "", text)
    if re.search(r'(?m)^(enable = true|env_name = "agent:)', text):  # neither has snapshots
        text = re.sub(r"(?ms)^#\[curriculum\].*?(?=^#?\[)", "", text)
    shown = re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text)
    assert shown != text
    # Keys of a table whose absence means something have their defaults only once the table is there; [data]
    # and [rollout_allocation_schedule], which have a key without one, stay away.
    shown = re.sub(r"(?m)^#(?=\[)(?!\[(data|rollout_allocation_schedule)\])", "", shown)
    tables = [
        name for name in ("cluster", "curriculum", "lora", "warmup", "rollout_only") if f"#[{name}]" in text
    ]
    there = text + "".join(f"[{name}]\n" for name in tables)
    configs = [parse_job(tomli.loads(each), where="test").config for each in (shown, there)]
    assert configs[0] == configs[1]


def test_a_fresh_preset_begins_with_a_warm_up_and_a_trained_model_does_not(tmp_path: Path):
    for number, env in enumerate(FRESH):
        fresh = write_job(tmp_path / f"{number}.toml", Choices(env)).config
        assert fresh.model.preset == "tiny-0.3m"
        assert fresh.warmup is not None
        assert (env in CONFIGS and ":" not in env) or fresh.warmup.policy_name == "random"
    (tmp_path / "m").mkdir()
    trained = write_job(tmp_path / "b.toml", Choices(model=str(tmp_path / "m"))).config
    assert (trained.model.path, trained.warmup) == (tmp_path / "m", None)
    assert trained.inference.threads == trained.training.threads == len(os.sched_getaffinity(0))
    assert write_job(tmp_path / "c.toml", Choices(model="a/b")).config.model.name == "a/b"


def test_every_environment_that_the_command_knows_is_in_these_tests():
    kinds = {env.partition(":")[0] + ":" for env in TRAINED if ":" in env}
    assert set(JOBS) == {*kinds, *CONFIGS}


@pytest.mark.parametrize(("env", "config"), CONFIGS.items())
def test_a_fresh_model_has_the_settings_of_the_config_that_is_known_to_learn(tmp_path, env, config):
    written = write_job(tmp_path / "job.toml", Choices(env)).config
    known = load_job(ROOT / f"configs/{config}.toml").config
    # The name is another one, the device is left to `auto`, and a dialogue's files lie next to the job.
    own = {"job": known.job, "model": known.model, "data": known.data, "multi_turn": known.multi_turn}
    assert written.model_copy(update=own) == known
    assert written.model.preset == known.model.preset
    if written.data is None or known.data is None:
        assert (written.data, written.multi_turn) == (known.data, known.multi_turn)
    else:
        path, place = written.data.path, {"interaction_config_path": tmp_path / "interactions.yaml"}
        assert path.read_bytes() == (ROOT / "configs/data/short_sums.jsonl").read_bytes()
        assert written.data == known.data.model_copy(update={"path": path})
        assert written.multi_turn == known.multi_turn.model_copy(update=place)


@contextmanager
def there(env: str) -> Iterator[str]:
    """The name of the environment; a server that it names is there."""
    if env.startswith("mcp:"):
        pytest.importorskip("mcp", reason="the package `mcp` is not installed")
        with served(sys.executable, "mcp_server.py") as url:
            yield f"mcp:{url}/mcp"
    else:
        with openenv(says(paid(1.0))) if env.startswith("openenv:") else nullcontext(env) as name:
            yield name


@asynccontextmanager
async def tried(folder: Path, env: str, model: str | None = None) -> AsyncIterator[Any]:
    """Planner, job, and the task app that takes what is written for this environment without a warning."""
    lines: list[str] = []
    with there(env) as name:
        write_job(folder / "job.toml", Choices(name, model=model))
        loaded = load_new_job([folder / "job.toml"])
        job = loaded.config
        planner = job_parts.trial_planner(job, "init", job_parts.data(job))
        url = task_app(job.multi_turn.interaction_config_path)
        async with TaskApps([url], TASK_APP_KEY, timeout_s=60, tell=lines.append) as apps:
            await try_job(planner, apps, from_scratch=True, preset=model is None)
            yield planner, job, apps
    assert (loaded.warnings, lines) == ((), [])


@pytest.mark.parametrize("env", [env for env in FRESH if env != "maze"])
async def test_a_task_app_takes_the_job_without_a_warning_and_what_is_imitated_is_paid(tmp_path, env):
    async with tried(tmp_path, env) as (planner, job, apps):
        # Who imitates needs no rewards, so a warm-up does not ask for their record.
        switches = {"step_rewards": job.training.step_rewards}
        requests = [request.model_copy(update=switches) for request in planner.warmup(most=16)]
        played = await Dispatcher(apps, timeout_s=120).collect(requests)
        await Dispatcher(apps, timeout_s=120).ack("init", played.all)
    assert list(played.failed) == []
    rewards = Rewards(job.training, job.multi_turn.max_decisions(job.rollout.max_turns))
    earned = [sum(rewards.earned_by(rollout, {}).rewards_T) for rollout in played.rollouts]
    assert len(earned) == 16
    assert max(earned) > 0.0
    # Calls by chance need not help; a teacher's episodes do, more often than not.
    assert job.warmup.policy_name == "random" or sum(reward > 0.0 for reward in earned) > 8


@pytest.mark.parametrize("env", [*CONFIGS, "gymnasium:CartPole-v1", "openenv:http://127.0.0.1:9"])
async def test_a_task_app_takes_the_job_of_a_trained_model_without_a_warning(tmp_path: Path, env: str):
    async with tried(tmp_path, env, "a/b") as (_, job, _):
        assert job.warmup is None


def test_a_package_of_ones_own_is_imitated_by_its_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metadata = tmp_path / "site/mazes-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mazes\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[turnwise.policies]\nmaze_teacher = mazes:TEACHER\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    warmup = write_job(tmp_path / "maze.toml", Choices("maze")).config.warmup
    assert warmup.policy_name == "maze_teacher"
    other = write_job(tmp_path / "other.toml", Choices("lake")).config.warmup
    assert other.policy_name == "random"


def test_a_file_that_is_there_is_left_alone_and_an_equal_example_kept(tmp_path: Path):
    write_job(tmp_path / "a.toml", Choices("dialogue"))
    write_job(tmp_path / "b.toml", Choices("dialogue"))
    names = ["a.toml", "b.toml", "interactions.yaml", "short_sums.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for mine, file in (("a.toml", "a.toml"), ("interactions.yaml", "c.toml")):
        (tmp_path / mine).write_text("mine")
        with pytest.raises(JobError, match=f"{mine} is there already.*; nothing was written"):
            write_job(tmp_path / file, Choices("dialogue"))
        assert (tmp_path / mine).read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == names


WORDS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=6)
SCALARS = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_a_value_on_one_line_reads_back_as_itself(value: object):
    line = f"x = {toml_value(value)}"
    assert "\n" not in line
    assert tomli.loads(line)["x"] == value
