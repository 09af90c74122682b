"""What the shell offers after a tab: run directories, presets, and the keys and names of `--set`."""

from collections.abc import Iterator
from pathlib import Path

from trainer_backend.core.presets import PRESETS
from trainer_backend.jobfile.docs import alternatives, table_model
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.plugins import ESTIMATORS


def run_directories(incomplete: str) -> list[str]:
    """Runs whose path begins so, and folders that may hold some; with nothing typed, those in runs/ too."""
    typed = Path(incomplete)
    beside = typed if incomplete.endswith("/") else typed.parent
    folders = [path for where in {beside, Path("runs")} for path in _folders(where)]
    found = {str(path) for path in folders if str(path).startswith(incomplete) and _is_run(path)}
    found |= {f"{path}/" for path in folders if str(path).startswith(incomplete) and not _is_run(path)}
    return sorted(found)


def presets(incomplete: str) -> list[str]:
    """Names of presets."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def estimators(incomplete: str) -> list[str]:
    """Names of estimators."""
    return [name for name in ESTIMATORS if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """`table.key=`, and the names that such a key takes, where it takes names."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in _keys() if name.startswith(incomplete)]
    return [f"{key}={name}" for name in _names(key) if name.startswith(value)]


def _keys() -> Iterator[str]:
    for table, field in JobConfig.model_fields.items():
        yield from (f"{table}.{key}" for key in table_model(field).model_fields)


def _names(dotted: str) -> list[str]:
    table, _, key = dotted.partition(".")
    model = JobConfig.model_fields.get(table)
    field = table_model(model).model_fields.get(key) if model else None
    return [] if field is None else alternatives(dotted, field)


def _folders(where: Path) -> list[Path]:
    try:
        return [path for path in where.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    return (path / "run.json").exists()
