"""Everything that a user can name, as JSON, to compare two trees: a script for the steps of the redesign.

    python -m bench.surface > FILE        what this tree has; `--jobs FOLDER` adds old job.toml of a folder
    python -m bench.surface A B           the differences between two such files; the exit code says whether

Keys are those of JobConfig's schema, routes and openapi.json those of the apps as the commands start them.
What a name of a plug board reads is found by loading jobs that set each key. Variables, file names and
metrics are the source's strings of their form, so a new string can be a false alarm. Descriptions and
sentences are left out: they may improve.
"""

import argparse
import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import uvicorn
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel
from typer.main import get_command

from bench.kit import ROOT
from service_kit.errors import ServiceError
from task_app.__main__ import app as task_app_command
from task_app.__main__ import main as task_app_main
from trainer_backend.__main__ import app as turnwise_command
from trainer_backend.__main__ import main as turnwise_main
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, load_job, parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.terminal.trainer_commands import commands as trainer_commands

PACKAGES = ("service_kit", "shared_schemas", "task_app", "trainer_backend", "turnwise")
FORMS = {
    "variables": r"(?:[A-Z][A-Z0-9]*_)+[A-Z0-9]+",
    "service_metrics": r"turnwise_[a-z_]+",
    "files": r"[\w{}.-]+\.(?:jsonl?|toml|parquet|log|db|sqlite3?|safetensors|html|csv|txt|lock)",
    "job_metrics": r"[a-z_]+/[a-z{}_/0-9]+",
}
SCHEDULE = "rollout_allocation_schedule"
# Keys without which a schedule of that name is refused.
NEEDED: dict[str, dict[str, Any]] = {
    "constant": {"alpha": 0.5},
    "linear": {"alpha_0": 0.5, "beta": 0.1},
    "exponential": {"gamma": 0.5},
    "step": {"switch_steps": [1]},
    "adaptive": {"alpha_0": 0.5},
}
# Further choices that other keys depend on.
SWITCHES: Sequence[dict[str, Any]] = (
    {"algorithm.advantage": "gae", "training.critic": "own"},
    {"training.kl_coef": 0.1},
    {"training.kl_reward_coef": 0.1},
    {"training.behaviour_weight_mode": "mask"},
    {"training.step_rewards_enabled": True, "training.step_rewards_mode": "env_sparse"},
)


def read_surface(jobs: Path | None) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        apps = {
            "task_app": served_app(task_app_main, "--port", "0"),
            "trainer": served_app(turnwise_main, "trainer", "--port", "0", "--data-dir", folder),
        }
    return {
        "routes": {name: sorted(routes(app)) for name, app in apps.items()},
        "openapi": {name: without_words(app.openapi()) for name, app in apps.items()},
        "toml": job_tables(),
        "boards": boards(),
        "plugins": task_app_plugins(),
        "commands": {
            "turnwise": command(turnwise_command),
            "task-app": command(task_app_command),
            "trainer": command(trainer_commands),
        },
        "errors": errors(),
        **strings(),
        "documented_metrics": documented_metrics(),
        "configs": resolved_jobs(ROOT / "configs"),
        "jobs": {} if jobs is None else resolved_jobs(jobs),
    }


class Caught(BaseException):
    """Ends a command at the moment when it would serve."""


def served_app(main: Callable[[], None], *arguments: str) -> Any:
    """The app that a command gives to uvicorn, whole and not started."""
    caught: list[Any] = []

    def catch(self: uvicorn.Config, app: Any, *_: Any, **__: Any) -> None:
        caught.append(app)
        raise Caught

    words, output = (
        patch.object(sys, "argv", ["turnwise", *arguments]),
        patch.object(sys, "stdout", sys.stderr),
    )
    with patch.object(uvicorn.Config, "__init__", catch), words, output:
        try:
            main()
        except (Caught, SystemExit) as end:
            if not caught:
                raise SystemExit(f"{arguments} served no app") from end
    app = caught[0]
    while not hasattr(app, "openapi"):  # behind middleware
        app = app.app
    return app


def routes(app: Any) -> Iterator[str]:
    """Each method and path, those of the pages too, which openapi.json leaves out."""
    for route in iter_route_contexts(app.routes):
        methods = getattr(route, "methods", None) or {type(route.original_route).__name__}
        yield from (f"{method} {route.path}" for method in methods)


def schema(model: type[BaseModel]) -> Any:
    """A model's JSON schema with what it refers to in place, so that a class may be renamed."""
    whole = model.model_json_schema()
    parts = whole.pop("$defs", {})

    def inlined(value: Any, within: tuple[str, ...] = ()) -> Any:
        match value:
            case {"$ref": str(ref), **rest}:
                name = ref.rpartition("/")[2]
                inner = "recursive" if name in within else inlined(parts[name], (*within, name))
                return {**inner, **inlined(rest, within)} if isinstance(inner, dict) else inner
            case dict():
                return {key: inlined(item, within) for key, item in value.items()}
            case list():
                return [inlined(item, within) for item in value]
        return value

    return without_words(inlined(whole))


def without_words(value: Any, *, names: bool = False) -> Any:
    """Without titles and descriptions; `names` says that the keys are a user's names."""
    if isinstance(value, dict):
        kept = {
            key: item
            for key, item in value.items()
            if names or key not in ("title", "description", "summary")
        }
        return {
            key: without_words(item, names=not names and key in ("properties", "schemas", "$defs"))
            for key, item in kept.items()
        }
    return [without_words(item) for item in value] if isinstance(value, list) else value


def job_tables() -> dict[str, Any]:
    """The tables, and the order of their keys, which the page of all keys shows."""
    tables = schema(JobConfig)["properties"]
    order = {name: [*schema_of_table(table).get("properties", {})] for name, table in tables.items()}
    return {"tables": tables, "order": order}


def schema_of_table(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object in a table's schema: itself, one of its alternatives, or an item of a list."""
    if "properties" in table:
        return table
    inner = [*table.get("anyOf", ()), *([table["items"]] if "items" in table else [])]
    return next((found for one in inner if (found := schema_of_table(one))), {})


def boards() -> dict[str, Any]:
    """For each name that a job may choose: the keys that may be set with it, and values that it brings."""
    from trainer_backend.plugins import BOARDS

    tables = schema(JobConfig)["properties"]
    keys = {
        f"{table}.{key}": values(item)
        for table in ("algorithm", "training", SCHEDULE)
        for key, item in schema_of_table(tables[table])["properties"].items()
    }
    plain = leaves(load_with({}))

    def probe(choice: Mapping[str, Any]) -> dict[str, Any]:
        chosen, of_schedule = leaves(load_with(choice)), f"{SCHEDULE}.type" in choice
        return {
            "brings": {key: value for key, value in chosen.items() if plain.get(key) != value},
            "reads": [
                key
                for key, tried in keys.items()
                if key not in choice or key in needed_keys
                if key.startswith(SCHEDULE) == of_schedule
                if any(load_with({**choice, key: value}) for value in tried)
            ],
        }

    needed_keys = {f"{SCHEDULE}.{key}" for needed in NEEDED.values() for key in needed}
    found = {}
    for board, names in BOARDS.items():
        choices: dict[str, dict[str, Any]] = {name: {board: name} for name in names}
        if board.startswith(SCHEDULE):
            for name, choice in choices.items():
                choice |= {f"{SCHEDULE}.{key}": value for key, value in NEEDED.get(name, {}).items()}
        found[board] = {name: probe(choice) for name, choice in choices.items()}
    return found | {"switches": {str(choice): probe(choice) for choice in SWITCHES}}


def values(item: Mapping[str, Any]) -> list[Any]:
    """Values that a key may have besides its default, by its schema."""
    found: list[Any] = []
    for one in (item, *item.get("anyOf", ())):
        low = one.get("minimum", one.get("exclusiveMinimum", 0))
        high = one.get("maximum", one.get("exclusiveMaximum", low + 3))
        found += one.get("enum", ())
        found += {
            "integer": [low + 1, low + 2],
            "number": [low + (high - low) / 3, low + (high - low) / 1.7],
            "boolean": [True, False],
            "array": [[1], [2, 5]],
            "string": ["constant", "cosine", "text_history"],
        }.get(one.get("type", ""), ())
    return [value for value in found if value != item.get("default")]


def load_with(settings: Mapping[str, Any]) -> JobConfig | None:
    """A job that sets these keys and little else; None if it is refused."""
    document: dict[str, Any] = {"model": {"preset": "tiny-0.3m"}}
    if any(key.startswith(SCHEDULE) for key in settings):
        document["rollout_only"] = {"model_path": "fixed"}
    for dotted, value in settings.items():
        table, _, key = dotted.partition(".")
        document.setdefault(table, {})[key] = value
    try:
        return parse_job(document, where="surface").config
    except JobError:
        return None


def leaves(job: JobConfig | None) -> dict[str, Any]:
    tables = {} if job is None else job.model_dump(mode="json", exclude={"rollout_only"})
    return {f"{table}.{key}": value for table, keys in tables.items() for key, value in (keys or {}).items()}


def task_app_plugins() -> dict[str, Any]:
    from task_app import plugins

    return {
        "environments": {name: schema(plugin.config) for name, plugin in plugins.ENVIRONMENTS.items()},
        "policies": {name: schema(plugin.config) for name, plugin in plugins.POLICIES.items()},
        "aliases": {**plugins.ENVIRONMENT_ALIASES, **plugins.POLICY_ALIASES},
    }


def command(typer_app: Any) -> dict[str, Any]:
    def options_of(one: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for parameter in one.params:
            default = getattr(parameter.default, "value", parameter.default)
            found["/".join((*parameter.opts, *parameter.secondary_opts))] = {
                "type": parameter.type.name,
                "default": default if isinstance(default, bool | int | float | list | None) else str(default),
                "required": parameter.required,
                "variable": parameter.envvar,
                "repeated": parameter.nargs != 1 or getattr(parameter, "multiple", False),
            }
        return found

    def walk(one: Any) -> dict[str, Any]:
        inner = {name: walk(child) for name, child in getattr(one, "commands", {}).items()}
        return {"options": options_of(one), **({"commands": inner} if inner else {})}

    return walk(get_command(typer_app))


def errors() -> dict[str, Any]:
    """Code, status and title of each error that has been imported so far, by its name."""
    found: dict[str, Any] = {}

    def walk(kind: type[ServiceError]) -> None:
        found[kind.__name__] = [kind.code, kind.status, kind.title, kind.retry_after_s, kind.recurs]
        for child in kind.__subclasses__():
            walk(child)

    walk(ServiceError)
    return found


def strings() -> dict[str, list[str]]:
    """The source's strings of each form; {} stands for what an f-string puts in."""
    found: dict[str, set[str]] = {name: set() for name in FORMS}
    rooms = {name.partition("/")[0] for name in documented_metrics()}
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
                )
            for name, form in FORMS.items():
                if re.fullmatch(form, text) and (name != "job_metrics" or text.partition("/")[0] in rooms):
                    found[name].add(text)
    settings = task_app_settings()
    found["variables"] |= {f"TURNWISE_{name.upper()}" for name in settings["properties"]}
    return {name: sorted(texts) for name, texts in found.items()} | {"task_app_settings": settings}


def task_app_settings() -> Any:
    from task_app.settings import Settings

    return schema(Settings)


def documented_metrics() -> list[str]:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("metrics.md", "mixture.md")]
    return sorted(set(re.findall(r"`([a-z_]+/[a-z{}*_/0-9]+)`", "".join(pages))))


def resolved_jobs(folder: Path) -> dict[str, Any]:
    """Each job of a folder as a run stores it, or the error, without the folder of this tree."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.toml")):
        try:
            job = load_job(path, runs_plugins=False)
            text = [*dump_job(job.config).splitlines(), *(f"# {line}" for line in job.warnings)]
        except JobError as error:
            text = ["error", *str(error).splitlines()]
        found[path.relative_to(folder).as_posix()] = [line.replace(str(ROOT), "ROOT") for line in text]
    return found


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{place}.{key}".lstrip(".")
            if key not in new or key not in old:
                yield f"{'-' if key in old else '+'} {inner}: {json.dumps(old.get(key, new.get(key)))[:200]}"
            else:
                yield from differences(old[key], new[key], inner)
    elif isinstance(old, list) and isinstance(new, list) and old != new:
        gone, come = [one for one in old if one not in new], [one for one in new if one not in old]
        yield from (f"- {place}: {json.dumps(one)[:200]}" for one in gone)
        yield from (f"+ {place}: {json.dumps(one)[:200]}" for one in come)
        if not gone and not come:
            yield f"~ {place}: another order or number"
    elif old != new:
        yield f"~ {place}: {json.dumps(old)[:200]} -> {json.dumps(new)[:200]}"


def compare_files(old: Path, new: Path) -> int:
    """Print the differences of two JSON files; return the exit code."""
    found = [*differences(*(json.loads(path.read_text(encoding="utf-8")) for path in (old, new)))]
    print("\n".join(found) or "equal")
    return int(bool(found))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", help="two files to compare; none: print this tree's")
    parser.add_argument("--jobs", type=Path, help="a folder of old job.toml to resolve too")
    asked = parser.parse_args(arguments)
    if asked.files:
        return compare_files(*asked.files)
    os.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith("TURNWISE_") or name.endswith("_API_KEY")]:
        del os.environ[name]
    print(json.dumps(read_surface(asked.jobs), indent=1, sort_keys=True, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
