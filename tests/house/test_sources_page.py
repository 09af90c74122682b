"""docs/sources.md: every published word has a row, and what its second column names is there."""

import re
import typing
from functools import cache
from importlib import import_module
from typing import Any

import tomli
from pydantic import BaseModel

from shared_schemas.rewards import TrainingSwitches
from task_app.app import create_app
from task_app.settings import Settings
from tests.house.sources import PACKAGES, ROOT
from trainer_backend.job.schema import JobConfig

PAGE = (ROOT / "docs/sources.md").read_text(encoding="utf-8")
ROWS = [
    (number, *(cell.strip() for cell in line.strip("|").split(" | ", 2)))
    for number, line in enumerate(PAGE.replace("| |", "|  |").splitlines(), 1)
    if line.startswith("| ") and not line.startswith("| published")
]
METRICS = "".join(
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/metrics.md", "docs/mixture.md")
)


def member(owner: Any, name: str) -> Any:
    """An attribute, or a field of a body or dataclass, which the class itself does not have."""
    fields = getattr(owner, "model_fields", {}) | getattr(owner, "__dataclass_fields__", {})
    return fields[name] if name in fields else getattr(owner, name)


def named(dotted: str) -> Any:
    """What a dotted name stands for: module by module, then attribute by attribute."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not ".".join(parts).startswith(str(error.name)):
                raise
            continue
        for name in parts[end:]:
            found = member(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def table_of_job(name: str) -> type[BaseModel]:
    annotation = JobConfig.model_fields[name].annotation
    inner = [annotation, *typing.get_args(annotation)]
    return next(one for one in inner if isinstance(one, type) and issubclass(one, BaseModel))


@cache
def operations() -> set[str]:
    paths = create_app(Settings(api_keys=("a-key",))).openapi()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def is_there(entry: str) -> bool:
    if key := re.fullmatch(r"\[(\w+)\] (\w+)", entry):
        return key[1] in JobConfig.model_fields and key[2] in table_of_job(key[1]).model_fields
    if re.match(r"[A-Z]+ /", entry):
        return entry in operations()
    if entry.split(".")[0] in PACKAGES and "/" not in entry:
        try:
            named(entry)
        except (AttributeError, ModuleNotFoundError):
            return False
        return True
    if (ROOT / entry).exists():
        return True
    return "/" in entry and f"`{entry}`" in METRICS


def test_each_source_has_its_table():
    assert re.findall(r"^## Source (\d)", PAGE, re.M) == ["1", "2", "3", "4", "5"]
    assert len(ROWS) > 120
    assert all(len(row) == 4 for row in ROWS)


def test_every_row_says_where_the_word_is_or_why_there_is_none():
    for number, published, where, why in ROWS:
        entries = re.findall(r"`([^`]+)`", where)
        assert published, number
        assert where == ", ".join(f"`{entry}`" for entry in entries), f"line {number}: {where}"
        assert entries or why, f"line {number}: {published} is nowhere, for no reason"


def test_what_the_page_names_is_there():
    entries = {entry for row in ROWS for entry in re.findall(r"`([^`]+)`", row[2])}
    assert sorted(entry for entry in entries if not is_there(entry)) == []


def test_every_config_sets_the_published_switches_with_a_reason_for_each():
    for path in (ROOT / "configs").glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        assert TrainingSwitches.model_fields.keys() <= tomli.loads(text)["training"].keys(), path
        for key in TrainingSwitches.model_fields:
            assert re.search(rf"^{key} = \S+ +# \w", text, re.MULTILINE), f"{path}: {key} has no reason"


def test_a_name_that_is_not_there_is_told_apart():
    wrong = [
        "[training] step_reward_mode", "[train] seed", "POST /env/creat", "configs/none.toml", "reward/summ",
        "turnwise.RolloutWorker", "shared_schemas.rewards.DecisionRewards.turns", "task_app.episod",
    ]  # fmt: skip
    assert [entry for entry in wrong if is_there(entry)] == []
