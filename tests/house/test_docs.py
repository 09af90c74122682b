"""What the docs say is true: keys, plug-ins, commands of the README. Metrics and routes have own files."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from service_kit.settings import find_variables, read_settings
from task_app.__main__ import app as task_app
from task_app.plugins import ENVIRONMENTS, POLICIES
from task_app.settings import Settings as TaskAppSettings
from tests import families_table
from tests.house.sources import ROOT
from trainer_backend.__main__ import app
from trainer_backend.job.docs import configuration_markdown
from trainer_backend.job.load import dump_job, load_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.jobs.settings import Settings
from trainer_backend.learner.calls import LEARNER_KEY
from trainer_backend.terminal.check_command import own_choices
from trainer_backend.terminal.jobs_client import URL_VARIABLE
from trainer_backend.terminal.output import TRAINER_COMMANDS
from trainer_backend.terminal.trainer_commands import commands as trainer_commands

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for match in re.finditer(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            found.append((page.name, match.group(1)))
    return found


def test_the_configuration_page_is_that_of_the_schema():
    assert text_of("docs/configuration.md") == configuration_markdown(), (
        "run: .venv/bin/python -m trainer_backend.job.docs > docs/configuration.md"
    )


def test_every_key_of_the_job_has_a_meaning():
    for table in JobConfig.model_fields:
        section = text_of("docs/configuration.md").split(f"## [{table}]")[1].split("\n## ")[0]
        empty = [line for line in section.splitlines() if line.startswith("| `") and line.endswith("|  |")]
        assert empty == []


# A warning that a comment of the config explains.
EXPLAINED = {"crafter_laptop.toml": ["training.entropy_coef = 0.001 with training.skip_certain_above = 0.98"]}


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.toml")), ids=lambda path: path.name)
def test_every_config_loads_and_survives_being_written(path: Path, tmp_path: Path):
    loaded = load_job(path)
    assert [text.partition(":")[0] for text in loaded.warnings] == EXPLAINED.get(path.name, [])
    again = tmp_path / "job.toml"
    for text in (dump_job(loaded.config), "\n".join(map("".join, own_choices(loaded.config)))):
        again.write_text(text)
        assert load_job(again).config == loaded.config


@pytest.mark.parametrize(("page", "block"), blocks("toml"))
def test_toml_blocks_load(page: str, block: str, tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(block)
    assert load_job(path).warnings == ()


EXAMPLE = ("by_hand.py", text_of("examples/by_hand.py"))


@pytest.mark.parametrize(("page", "block"), [*blocks("python"), EXAMPLE])
def test_python_blocks_and_the_example_run(
    page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    file = tmp_path / f"{page}.py"
    file.write_text(block)
    runpy.run_path(str(file), run_name="__main__")


def turnwise_lines() -> list[str]:
    """The calls of `turnwise` in console blocks; tests/contract/test_readme.py runs those of the README."""
    text = "".join(block.replace("\\\n", "") for _, block in blocks("console"))
    return sorted(set(re.findall(r"^\$ (turnwise [^|&\n]*)", text, re.M)))


@pytest.mark.parametrize("line", turnwise_lines())
def test_commands_of_the_docs_and_their_options_exist(line: str):
    words = shlex.split(line, comments=True)[1:]
    homes = {"task-app": task_app, **dict.fromkeys(TRAINER_COMMANDS, trainer_commands)}
    command: Any = get_command(homes.get(words[0], app))
    words = words[words[0] == "task-app" :]  # whose own process reads the rest
    while hasattr(command, "commands"):  # typer's groups are of no class of the click that is installed
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words).close()


def test_every_plug_in_is_documented():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in (*ENVIRONMENTS, *POLICIES):
        assert f"`{name}`" in pages, f"{name} is in no page"


def test_the_operator_is_told_of_the_database_file_by_its_name():
    name = read_settings(Settings, {}).database_url.rpartition("/")[2]
    page = text_of("docs/operations.md")
    assert f"`DATA_DIR/{name}`" in page
    assert set(re.findall(r"turnwise\.(?:db|sqlite\w*)", page)) == {name}


def test_every_variable_that_a_page_names_is_a_setting_with_the_default_that_it_tells():
    tables = {TaskAppSettings: TaskAppSettings(), Settings: Settings()}
    known = {
        variable.name: getattr(default, field)
        for table, default in tables.items()
        for field, variable in find_variables(table).items()
    }
    others = {LEARNER_KEY, f"{LEARNER_KEY}_FILE", URL_VARIABLE, "TURNWISE_API_KEY", "TURNWISE_CAPTURE_URL"}
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"\bTURNWISE_[A-Z_]*[A-Z]\b", text)) - known.keys() - others == set()
    for name, told in re.findall(r"`(TURNWISE_[A-Z_]+)` \((\d+)\)", text):
        assert known[name] == float(told), name


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_make_targets_of_the_readme_exist():
    makefile = text_of("Makefile")
    for target in set(re.findall(r"\bmake ([a-z-]+)", text_of("README.md"))):
        assert re.search(rf"^{target}:", makefile, re.M), f"README names make {target}"


def test_no_registry_address_is_committed():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    hosts = ("pypi" + ".org", "pythonhosted" + ".org", "download.py" + "torch", "registry.npm" + "js")
    for name in files:
        path = ROOT / name
        if path.is_file() and path.suffix not in {".png"}:
            assert not any(host in path.read_text(encoding="utf-8", errors="replace") for host in hosts), name


def test_the_table_of_families_is_what_their_layers_decide():
    assert families_table.table() in text_of("docs/models.md"), (
        "run: .venv/bin/python -m tests.families_table"
    )
