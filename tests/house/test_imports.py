"""Who may import whom (DESIGN.md section 2). Read from the source, so that a lazy import counts too."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.house.sources import ROOT, name_of, package_sources, statements

# Each outside library, and the folders or files that may import it.
DOORS = {
    "bm25s": ["task_app/environments/documents/chunks.py"],
    "crafter": ["task_app/environments/crafter"],
    "opensimplex": ["task_app/environments/crafter"],
    "PIL": ["task_app/observing/replaying.py"],
    "httpx": [
        "task_app/environments/foreign/wire.py",
        "task_app/environments/foreign/children/verifiers_harness.py",
        "trainer_backend/terminal/jobs_client.py",
        "trainer_backend/processes/learner_process.py",
        "service_kit/replies.py",
    ],
    "yaml": ["task_app/interactions/config_file.py", "trainer_backend/job/code_files.py"],
    "aiohttp": [
        "task_app",
        "trainer_backend/collect",
        "trainer_backend/inference/remote_engine.py",
        "trainer_backend/inference/vllm_engine.py",
        "trainer_backend/pages",
        "trainer_backend/processes/gateway.py",
        "service_kit/replies.py",
    ],
    **{
        library: ["task_app/environments/foreign/children"]
        for library in ("reasoning_gym", "textarena", "verifiers")
    },
    "gymnasium": [
        "task_app/dialects",
        "task_app/environments/foreign",
        "task_app/environments/babyai/level.py",
    ],
    "minigrid": ["task_app/environments/babyai/level.py", "task_app/policies/teachers.py"],
    "jsonschema": ["task_app/environments/foreign/schemas.py", "task_app/policies/random_values.py"],
    "prometheus_client": [
        "service_kit/observed.py",
        "task_app/observing/metrics.py",
        "task_app/routes/service.py",
        "trainer_backend/jobs",
    ],
    "itsdangerous": ["trainer_backend/jobs/sessions.py"],
    "sqlalchemy": ["trainer_backend/store"],
    "alembic": ["trainer_backend/store"],
    "psycopg": ["trainer_backend/store"],
    "matplotlib": [],
    "pyarrow": [
        "trainer_backend/rundir",
        "trainer_backend/data/records.py",
        "trainer_backend/terminal/export.py",
    ],
    "typer": [
        "service_kit/settings.py",
        "task_app/__main__.py",
        "trainer_backend/__main__.py",
        "trainer_backend/terminal",
    ],
    "fastapi": ["task_app", "trainer_backend/jobs", "trainer_backend/pages"],
    "starlette": [
        "service_kit",
        "task_app",
        "trainer_backend/jobs",
        "trainer_backend/inference",
        "trainer_backend/learner/process.py",
        "trainer_backend/pages",
    ],
    "uvicorn": ["service_kit"],
    "uvloop": ["service_kit"],
    "transformers": ["trainer_backend/models", "trainer_backend/inference", "trainer_backend/learner"],
    "tokenizers": ["trainer_backend/models", "trainer_backend/pages/token_view.py"],
    "huggingface_hub": ["trainer_backend/models"],
    "safetensors": ["trainer_backend/models", "trainer_backend/inference", "trainer_backend/learner"],
    "vllm": ["trainer_backend/inference/vllm_worker"],  # which runs in vLLM's environment
    "triton": [
        "trainer_backend/inference/paged_kernel.py",
        "trainer_backend/inference/sampler_kernel.py",
        "trainer_backend/models/kernels.py",
    ],
    "tensorboard": ["trainer_backend/sinks.py"],
    "opentelemetry": ["task_app/observing/spans.py"],
    "wandb": ["trainer_backend/sinks.py"],
    "trackio": ["trainer_backend/sinks.py"],
    "peft": ["trainer_backend/learner/adapter.py", "trainer_backend/learner/adapter_folder.py"],
    "ray": ["trainer_backend/processes/ray.py"],
    "pydantic_settings": ["service_kit/settings.py"],
    "psutil": ["trainer_backend/jobs", "trainer_backend/learner"],
    "torch": [
        "trainer_backend/core",
        "trainer_backend/models",
        "trainer_backend/inference",
        "trainer_backend/learner",
    ],
}
IO_LIBRARIES = {
    "asyncio",
    "aiohttp",
    "httpx",
    "os",
    "pathlib",
    "subprocess",
    "socket",
    "time",
    "shutil",
    "logging",
}


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each file imports."""
    return {name_of(path): imported(tree) for path, tree in package_sources().items()}


@cache
def libraries_of() -> dict[str, set[str]]:
    """The packages that each file imports."""
    return {name: {module.partition(".")[0] for module in modules} for name, modules in imports().items()}


def files_of(package: str) -> list[str]:
    return [name for name in imports() if name.startswith(package + "/")]


def outside(package: str, allowed: set[str]) -> dict[str, set[str]]:
    """The other libraries that files of a package import."""
    found = {name: libraries_of()[name] - allowed for name in files_of(package)}
    return {name: libraries for name, libraries in found.items() if libraries}


def among(package: str, forbidden: set[str]) -> dict[str, set[str]]:
    """The libraries of these that files of a package import."""
    found = {name: libraries_of()[name] & forbidden for name in files_of(package)}
    return {name: libraries for name, libraries in found.items() if libraries}


def test_packages_keep_apart():
    schemas = {"shared_schemas", "pydantic", "pydantic_core", *sys.stdlib_module_names}
    edge = {"service_kit", "cachetools", "starlette", "structlog", "prometheus_client", "uvicorn", "uvloop"}
    edge |= {"aiohttp", "aiohappyeyeballs", "httptools", "httpx", "pydantic_settings", "typer", "yarl"}
    for package, allowed in {"shared_schemas": schemas, "service_kit": schemas | edge}.items():
        assert outside(package, allowed) == {}
    forbidden = {
        "task_app": {"trainer_backend", "turnwise", "torch", "transformers", "tokenizers", "sqlalchemy"},
        "trainer_backend": {"task_app", "turnwise"},
        # It runs in Pythons that have no Turnwise.
        "task_app/environments/foreign/children": {"shared_schemas", "service_kit", "task_app", "pydantic"},
    }
    for package, libraries in forbidden.items():
        assert among(package, libraries) == {}


def test_outside_libraries_come_in_by_their_doors():
    for name, libraries in libraries_of().items():
        for library in libraries & DOORS.keys():
            doors = DOORS[library]
            assert _is_in(name, doors), f"{name} imports {library}; its doors are {doors}"


def test_the_core_does_no_io():
    core = files_of("trainer_backend/core")
    assert among("trainer_backend/core", IO_LIBRARIES) == {}
    assert [name for name in core if "open(" in (ROOT / name).read_text(encoding="utf-8")] == []


def test_the_orchestrator_the_service_and_the_command_line_know_no_torch():
    # What a run imports later it imports for [cluster] without torch: `tests/contract/test_cluster.py`.
    modules = ("start", "__main__", "jobs.server", "jobs.submission", "pages.app")
    names = ", ".join(f"trainer_backend.{name}" for name in modules)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# What takes 30 ms or more to import, and which of it each command may load before it works. `nowhere` is no
# run: the command ends after its imports.
HEAVY = {
    *("aiohttp", "alembic", "crafter", "fastapi", "httpx", "huggingface_hub", "jsonschema", "numpy", "peft"),
    *("opentelemetry.sdk", "pyarrow", "pydantic", "sqlalchemy", "structlog", "tokenizers", "torch"),
    *("transformers", "uvicorn"),
}
LOADED = {
    "turnwise --help": set[str](),
    "turnwise jobs --help": set[str](),
    "turnwise trainer --help": {"pydantic"},
    "turnwise info": {"structlog"},
    "turnwise inspect 1 --run nowhere": {"numpy", "pyarrow", "pydantic"},
    "turnwise export nowhere --to rows.jsonl": {"numpy", "pyarrow", "pydantic"},
    "task-app --help": {"pydantic"},
    # No port of ours: it ends when all is imported and the app is made.
    "task-app --host 192.0.2.1": {"fastapi", "pydantic", "structlog", "uvicorn"},
}


@pytest.mark.parametrize("command", LOADED)
def test_a_command_loads_the_heavy_modules_of_its_work_alone(command: str, tmp_path: Path):
    program, *words = command.split()
    module = {"turnwise": "trainer_backend.__main__", "task-app": "task_app.__main__"}[program]
    code = f"import atexit, sys, {module} as program\n"
    code += "atexit.register(lambda: print(*sys.modules))\nprogram.main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TYPER_USE_RICH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert HEAVY.intersection(done.stdout.splitlines()[-1].split()) == LOADED[command]


def test_peft_is_imported_by_a_run_with_adapters_alone():
    """It takes half a second; each learner, gateway and engine imports the other files of the learner."""
    found = set()
    for path, tree in package_sources().items():
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = imported(ast.Module(at_once, []))
        if any(f"{module}.".startswith(("peft.", "trainer_backend.learner.adapter.")) for module in modules):
            found.add(name_of(path))
    assert found == {"trainer_backend/learner/adapter.py"}


def module_of(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def test_the_process_of_a_reward_function_imports_no_environment_and_no_web():
    modules = {module_of(name): name for name in imports()}
    reached, ahead = set[str](), ["task_app.reward_functions.child"]
    while ahead:
        module = ahead.pop()
        if module not in reached:
            reached.add(module)
            ahead += imports()[modules[module]] & modules.keys()
    assert {"service_kit.plugin_file", "task_app.reward_functions.decorator"} <= reached
    assert not [name for name in reached if name.startswith(("task_app.environments", "task_app.policies"))]
    libraries = {library for module in reached for library in libraries_of()[modules[module]]}
    assert not libraries & {"aiohttp", "fastapi", "starlette", "numpy", "crafter"}


def test_there_are_no_import_cycles():
    modules = {module_of(name): names for name, names in imports().items()}
    edges = {name: names & modules.keys() for name, names in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(modules):
        visit(name, ())


# Who reads a whole job; all others are given its tables.
OF_A_WHOLE_JOB = {
    "trainer_backend/job": "declares, loads and checks it",
    "trainer_backend/job_parts.py": "gives each part of a run its tables",
    "trainer_backend/learner_parts.py": "gives the learner its tables",
    "trainer_backend/start.py": "puts a run together",
    "trainer_backend/evaluation/play.py": "puts an evaluation together",
    "trainer_backend/evaluation/truth.py": "puts a measurement together",
    "trainer_backend/terminal": "the commands, which load one",
    "trainer_backend/jobs/posted.py": "compares every key of a posted one with the operator's bounds",
    "trainer_backend/rundir/layout.py": "reads and writes job.toml",
    "trainer_backend/pages/story.py": "the report shows it whole",
    "trainer_backend/pages/facts.py": "lists its tables, for their defaults",
}


def test_parts_are_given_tables_and_no_whole_job():
    """What is handed a job, or keeps one, names its class."""
    readers = [
        name_of(path)
        for path, tree in package_sources().items()
        if "JobConfig" in path.read_text(encoding="utf-8")
        and any(
            "JobConfig" in (getattr(node, "name", ""), getattr(node, "attr", "")) for node in ast.walk(tree)
        )
    ]
    others = [name for name in readers if not _is_in(name, OF_A_WHOLE_JOB)]
    assert others == [], f"they import JobConfig; take the tables that are read, or see {OF_A_WHOLE_JOB}"
    assert [place for place in OF_A_WHOLE_JOB if not any(_is_in(name, [place]) for name in readers)] == []


def _is_in(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(place + "/") for place in places)
