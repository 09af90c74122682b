"""Who may import whom (DESIGN.md section 2). Read from the source, so that a lazy import counts too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("shared_schemas", "task_app", "trainer_backend")
# Each outside library, and the folders or files that may import it.
DOORS = {
    "bm25s": ["task_app/environments/documents/search.py"],
    "crafter": ["task_app/environments/crafter"],
    "opensimplex": ["task_app/environments/crafter"],
    "PIL": ["task_app/observing/pictures.py", "trainer_backend/report"],
    "httpx": ["trainer_backend/collect/environment_client.py", "trainer_backend/terminal/jobs_client.py"],
    "yaml": ["task_app/interactions/config_file.py"],
    "aiohttp": ["task_app", "trainer_backend/collect", "trainer_backend/report"],
    "gymnasium": ["task_app/dialects"],
    "prometheus_client": ["task_app/observing/exposition.py", "trainer_backend/api/exposition.py"],
    "sqlalchemy": ["trainer_backend/store"],
    "alembic": ["trainer_backend/store"],
    "psycopg": ["trainer_backend/store"],
    "matplotlib": ["trainer_backend/report"],
    "pyarrow": ["trainer_backend/rundir", "trainer_backend/data/records.py", "trainer_backend/export"],
    "typer": ["trainer_backend/__main__.py", "trainer_backend/terminal"],
    "fastapi": ["task_app", "trainer_backend/api", "trainer_backend/dashboard"],
    "starlette": [
        "task_app",
        "trainer_backend/api",
        "trainer_backend/inference",
        "trainer_backend/dashboard",
    ],
    "uvicorn": [
        "task_app/guards/connections.py",
        "task_app/server.py",
        "task_app/__main__.py",
        "trainer_backend/api/connections.py",
        "trainer_backend/api/server.py",
        "trainer_backend/inference/server.py",
    ],
    "transformers": ["trainer_backend/models", "trainer_backend/inference", "trainer_backend/learner"],
    "tokenizers": ["trainer_backend/models", "trainer_backend/dashboard/token_texts.py"],
    "huggingface_hub": ["trainer_backend/models"],
    "safetensors": ["trainer_backend/models", "trainer_backend/inference", "trainer_backend/learner"],
    "tensorboard": ["trainer_backend/sinks/tensorboard.py"],
    "wandb": ["trainer_backend/sinks/wandb.py"],
    "peft": ["trainer_backend/learner"],
    "psutil": ["trainer_backend/learner"],
    "torch": [
        "trainer_backend/core",
        "trainer_backend/models",
        "trainer_backend/inference",
        "trainer_backend/learner",
    ],
}
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_packages_keep_apart(path: Path):
    package, found = name_of(path).partition("/")[0], roots(path)
    if package == "shared_schemas":
        assert found <= {"shared_schemas", "pydantic", "pydantic_core", *sys.stdlib_module_names}
    if package == "task_app":
        assert not found & {"trainer_backend", "torch", "transformers", "tokenizers", "sqlalchemy"}
    if package == "trainer_backend":
        assert "task_app" not in found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_outside_libraries_come_in_by_their_doors(path: Path):
    name = name_of(path)
    for library in roots(path) & DOORS.keys():
        doors = DOORS[library]
        assert any(name == door or name.startswith(door + "/") for door in doors), (
            f"{name} imports {library}; its doors are {doors}"
        )


@pytest.mark.parametrize("path", sorted((ROOT / "trainer_backend/core").rglob("*.py")), ids=name_of)
def test_the_core_does_no_io(path: Path):
    shells = {
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
    assert not roots(path) & shells
    assert "open(" not in path.read_text(encoding="utf-8")


def test_the_orchestrator_knows_no_torch():
    code = "import sys, trainer_backend.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_command_line_starts_without_torch():
    code = "import sys, trainer_backend.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_there_are_no_import_cycles():
    modules = {
        name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in FILES
    }
    edges = {name: imported(path) & modules.keys() for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(modules):
        visit(name, ())
