"""The commands of the README, as printed and in their order, in an empty folder with a tiny job.

`make demo` and `make test` are targets of the Makefile (tests/house/test_docs.py), and the files of
`docker compose up` are checked in tests/house/test_containers.py; they take minutes, or need docker.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tomli
import tomli_w
from typer.testing import CliRunner

from service_kit.own_process import READY
from trainer_backend.__main__ import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ ").partition("#")[0].strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.S)
    for line in block.splitlines()
]
ELSEWHERE = {"make demo", "make test", "docker compose up"}
SERVICE = "turnwise trainer"
# What stands for a name of the reader's own.
NAMED = {"ROLLOUT": "train/1/0/1", "RUN RUN": "runs/my runs/other"}
# What each prints, among other lines.
PRINTS = {
    "turnwise check my.toml": 'preset = "tiny-0.3m"',
    "turnwise train my.toml": "report: ",
    "turnwise eval runs/my": "unique achievements",
    "turnwise inspect ROLLOUT": "decision 1",
    "turnwise compare RUN RUN": "comparison: ",
}
TINY = {
    "rollout": {"max_turns": 2, "episodes_per_batch": 4},
    "warmup": {"episodes": 6, "epochs": 1, "batch_decisions": 12},
    "training": {"iterations": 1, "group_size": 2},
    "evaluation": {"instances": 2},
}
# No key, as on a machine where none is set.
ENVIRON = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_KEY_FILE"))}
ENVIRON |= {
    "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with my.toml: the job of the README, in tiny sizes."""
    made = tmp_path_factory.mktemp("reader")
    (block,) = re.findall(r"```toml\n(.*?)```", README, re.S)
    job = tomli.loads(block)
    for table, sizes in TINY.items():
        job.setdefault(table, {}).update(sizes)
    (made / "my.toml").write_text(tomli_w.dumps(job))
    return made


def test_every_command_of_the_readme_is_run_here_or_has_its_test_elsewhere():
    assert set(COMMANDS) == ELSEWHERE | PRINTS.keys() | {SERVICE}


def test_the_commands_of_the_readme_work_one_after_the_other_as_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """In this process, which has imported torch already; the shell starts the trainer below."""
    monkeypatch.chdir(folder)
    for name in os.environ.keys() - ENVIRON.keys():
        monkeypatch.delenv(name)
    for command in filter(PRINTS.__contains__, COMMANDS):
        line = command
        if "RUN RUN" in line:
            shutil.copytree(folder / "runs/my", folder / "runs/other")
        for name, value in NAMED.items():
            line = line.replace(name, value)
        program, *words = shlex.split(line)
        done = CliRunner().invoke(app, words)
        assert (program, done.exit_code) == ("turnwise", 0), f"{line}: {done.output}"
        assert PRINTS[command] in done.stdout, f"{line}: {done.stdout}"


def test_the_trainer_of_the_readme_answers_this_machine_without_a_key_and_no_foreign_page(folder: Path):
    command = f"exec {SERVICE} --port 0"  # 8100 may be in use
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=ENVIRON, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith(READY))
        page = httpx.get(url, headers={"Accept": "text/html"}, follow_redirects=True)
        assert (page.status_code, "my" in page.text) == (200, True)
        strange = (
            {"Origin": "https://elsewhere.example"},
            {"Host": "elsewhere.example"},
            {"Via": "1.1 proxy"},
        )
        for headers in strange:
            assert httpx.post(f"{url}/jobs", headers=headers).status_code == 403, headers
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
