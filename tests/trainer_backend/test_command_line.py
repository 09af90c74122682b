"""`turnwise`: its output, and its exit codes."""

import io
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import tomli
from click.testing import Result
from typer.testing import CliRunner

from shared_schemas.prefixes import PREFIXES
from tests.conftest import TASK_APP_KEY, task_app, tiny_job
from tests.trainer_backend.pages.hand_made import small_run
from trainer_backend.__main__ import app, main
from trainer_backend.errors import CheckpointError, JobError, RunDirectoryError, TaskAppError
from trainer_backend.job.load import dump_job, load_job
from trainer_backend.rundir.layout import create_run, open_run
from trainer_backend.rundir.state import read_log
from trainer_backend.terminal.check_command import own_choices, whole_job

GOOD = '[model]\npreset = "tiny-0.3m"\n'


def turnwise(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What the process would print and end with; tests/contract starts one."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["turnwise", *arguments])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture
def key_of_the_task_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVIRONMENT_API_KEY", TASK_APP_KEY.get_secret_value())


def test_check_prints_what_differs_or_the_whole_job_as_toml_and_its_warnings_apart(tmp_path: Path):
    (tmp_path / "job.toml").write_text(GOOD + "[training]\niterations = 20\n[vllm]\nx = 1\n")
    done = turnwise("check", "job.toml", "--no-trial", cwd=tmp_path)
    assert done.returncode == 0
    assert tomli.loads(done.stdout) == {"model": {"preset": "tiny-0.3m"}}
    warning, biased, others = done.stderr.splitlines()
    assert others == "all other keys have their defaults; --all prints them too"
    whole = turnwise("check", "job.toml", "--no-trial", "--all", cwd=tmp_path)
    assert tomli.loads(whole.stdout) == tomli.loads(dump_job(load_job(tmp_path / "job.toml").config))
    assert whole.stderr.splitlines() == [warning, biased]
    assert warning.startswith("warning: [vllm] is for other backends and is not read")
    assert biased.startswith("expected policy gradient, biased by: training.aggregation = 'token_mean' (")


def test_check_marks_what_differs_from_its_default_and_nothing_else(tmp_path: Path):
    changed = "rollout = { env_config = { text = 'compact' }, max_turns = 9 }\nevaluation.seeds = [4, 5]\n"
    (tmp_path / "mine.toml").write_text(changed + GOOD + "[warmup]\nepisodes = 480\n[lora]\nrank = 3\n")
    for arguments in ((), ("--all",)):
        printed = turnwise("check", "mine.toml", "--no-trial", *arguments, cwd=tmp_path).stdout
        marked = [line for line in printed.splitlines() if "  # default: " in line]
        assert marked == [
            'name = "mine"         # default: "job"',
            'preset = "tiny-0.3m"  # default: none',
            "max_turns = 9         # default: 50",
            "[rollout.env_config]  # default: {}",
            "[lora]                # default: none",
            "rank = 3              # default: 16",
            "[warmup]              # default: none",
            "seeds = [             # default: []",
        ]
        assert tomli.loads(printed)["evaluation"]["seeds"] == [4, 5]


def test_check_marks_each_of_several_tables_by_its_own_values_and_prints_no_digest_of_a_file():
    policies = [{"name": "a", "model_path": "a", "weight": 2.0}, {"name": "b", "model_path": "b"}]
    schedule = {"type": "constant", "alpha": 0.5}
    plugins = {"task_plugins": ["mine.py"], "task_plugins_sha256": ["0" * 64]}
    job = tiny_job(rollout_only=policies, rollout_allocation_schedule=schedule, services=plugins)
    lines = [" ".join((toml + mark).split()) for toml, mark in whole_job(job)]
    assert [line for line in lines if "weight = " in line] == ["weight = 2.0 # default: 1.0", "weight = 1.0"]
    own = "\n".join(toml for toml, _ in own_choices(job))
    assert tomli.loads(own)["rollout_only"] == policies
    assert tomli.loads(own)["services"] == {"task_plugins": ["mine.py"]}
    assert own.count("[[rollout_only]]") == 2


def test_info_lists_the_prefixes_and_how_modules_are_named(tmp_path: Path):
    told = turnwise("info", cwd=tmp_path).stdout
    assert "built in: babyai, " in told
    assert all(f"\n{name}:{prefix.argument}: {prefix.plays}\n" in told for name, prefix in PREFIXES.items())
    assert 'services.gymnasium_modules = ["module"]' in told


def test_check_asks_the_own_task_app_and_says_of_another_that_it_was_not_asked(tmp_path: Path):
    (tmp_path / "job.toml").write_text(GOOD)
    done = turnwise("check", "job.toml", "--set", "rollout.env_name=craftr", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: rollout.env_name: unknown environment 'craftr'. Did you ")
    done = turnwise("check", "job.toml", "--set", "services.task_url=http://there:1", cwd=tmp_path)
    assert done.stderr.startswith("not tried: environment and policies are of http://there:1\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("check", "bad [/x].toml"), "error: bad [/x].toml: trainning is not a key"),
        (("check", "none [/x].toml"), "error: none [/x].toml: no such file"),
        (("check", "gone.toml"), "error: gone.toml: model.path is "),
        (("train",), "error: give either a job TOML, or --resume"),
    ],
)
def test_a_user_s_mistake_is_one_sentence_and_exit_code_2(tmp_path, arguments, told):
    (tmp_path / "bad [").mkdir()
    (tmp_path / "bad [" / "x].toml").write_text(GOOD + "[trainning]\n")
    (tmp_path / "gone.toml").write_text('[model]\npath = "/of/a/folder/that/is/gone"\n')
    done = turnwise(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(told)
    assert "Traceback" not in done.stderr


def test_the_version_is_told():
    assert CliRunner().invoke(app, ["--version"]).output == f"turnwise {version('turnwise')}\n"


@pytest.mark.usefixtures("key_of_the_task_app")
def test_a_mistake_that_only_a_task_app_sees_is_told_before_anything_is_played(tmp_path: Path):
    path, run = tmp_path / "job.toml", tmp_path / "runs" / "run"
    path.write_text(dump_job(tiny_job()))
    wrong, url = "rollout.env_config.txt=full", f"services.task_url={task_app()}"
    done = turnwise("train", str(path), "--run", str(run), "--set", wrong, "--set", url, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert done.stderr.startswith(
        "error: rollout.env_config.txt: unknown key 'txt'. Did you mean 'text'? "
        "Known: history, length, max_actions, memory, text (says the task app at http://127.0.0.1:"
    )
    assert done.stdout.endswith(f"{run} is removed again: nothing was done in it\n")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_task_app_that_cannot_be_used_leaves_no_run_folder_behind(tmp_path: Path):
    path, run = tmp_path / "job.toml", tmp_path / "run"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        path.write_text(dump_job(tiny_job(services__task_url=url, services__request_timeout_s=0.2)))
        arguments = ["train", str(path), "--run", str(run), "--set", "services.task_api_key=k"]
        with pytest.raises(TaskAppError, match=url):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not run.exists()


def test_a_run_that_was_there_before_is_not_removed_by_a_mistake(tmp_path: Path):
    run = create_run(tiny_job(), tmp_path / "run")
    arguments = ["train", "--resume", str(run.path), "--set", "services.gateway_host=0.0.0.0"]
    with pytest.raises(JobError, match="listens everywhere"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert open_run(run.path) == run


@pytest.mark.usefixtures("key_of_the_task_app")
def test_overrides_of_a_resumed_run_are_written_down_once_it_goes_on(trained, tmp_path: Path):
    shutil.copytree(trained[0].path, tmp_path / "run")
    run = open_run(tmp_path / "run")
    before = run.job()
    with pytest.raises(JobError):
        resume(run.path, "training.iterations=-7")
    with pytest.raises(CheckpointError, match="but the job's model is"):
        resume(run.path, "training.iterations=3", "model.preset=tiny-0.8m")
    assert run.job() == before, "what was refused has changed nothing"
    resume(run.path, "training.iterations=3", "training.kl_coef=0.25")
    assert run.job().training.kl_coef == 0.25
    texts = [line.text for line in read_log(run.path)[0]]
    assert f"3 iterations done; saved in {run.checkpoints}" in texts
    assert any("best checkpoint: iteration" in text for text in texts)
    assert texts[-1] == "ended: 3 of 3 iterations done"

    # It is finished now: nothing of it changes any more, its end least of all.
    files = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    done = resume(run.path, "training.kl_coef=0.5")
    told = " ".join(done.output.split())
    assert done.exit_code == 0
    assert f"{run.path} is finished: all of 3 iterations are done" in told
    assert f"turnwise train --resume {run.path} --set training.iterations=6" in told
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == files


def resume(run: Path, *overrides: str) -> Result:
    arguments = ["train", "--no-report", "--resume", str(run), "--set", f"services.task_url={task_app()}"]
    arguments += [word for override in overrides for word in ("--set", override)]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_run_is_either_new_or_continued(tmp_path: Path):
    run = create_run(tiny_job(), tmp_path / "run").path
    with pytest.raises(JobError, match="leave --run out"):
        CliRunner().invoke(app, ["train", "--resume", str(run), "--run", "x"], catch_exceptions=False)
    with pytest.raises(JobError, match="give either"):
        CliRunner().invoke(app, ["train", "job.toml", "--resume", str(run)], catch_exceptions=False)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        CliRunner().invoke(app, ["train", "--resume", str(tmp_path)], catch_exceptions=False)


def test_a_report_that_cannot_be_written_names_its_place(tmp_path: Path):
    run = small_run(
        tiny_job(services__task_url="http://127.0.0.1:9", services__request_timeout_s=1), tmp_path / "run"
    )
    (run.path / "report").write_text("a file where the folder belongs")
    with pytest.raises(RunDirectoryError, match="run/report cannot be written"):
        CliRunner().invoke(app, ["report", str(run.path)], catch_exceptions=False)


@pytest.mark.parametrize("module", ["torch", "sqlalchemy.orm", "mine"])
def test_a_command_that_lacks_the_extra_and_no_other_module_says_how_to_install_it(
    monkeypatch, tmp_path: Path, module: str
):
    def lacks_it() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("trainer_backend.__main__.app", lacks_it)
    if module == "mine":
        with pytest.raises(ModuleNotFoundError, match="mine"):
            turnwise(cwd=tmp_path)
        return
    done, package = turnwise(cwd=tmp_path), module.partition(".")[0]
    told = f"error: {package} is not installed; this command needs it: pip install 'turnwise[trainer]'\n"
    assert (done.returncode, done.stderr) == (2, told)
