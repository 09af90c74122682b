"""The job that existing launchers send, as one of ours: published keys that mean something here are put where
ours are; the others are named, and not read. Pure.

The shape is that of synth-ai: `{job_type, compute, data: {endpoint_base_url, config, model}, tags}`.
"""

from collections.abc import Iterator
from typing import Any

from trainer_backend.api.posted import refuse_unwritable
from trainer_backend.errors import JobError
from trainer_backend.jobfile.model_table import HUB_NAME

# Published keys that only other backends know, by table. They are left out, and the reply says so.
NOT_READ = {
    "algorithm": ("type", "method", "variety"),
    "services": ("judge_url",),
    "model": ("trainer_mode", "label"),
    "rollout": ("batches_per_step", "ops"),
    "training": (
        "batch_size",
        "max_turns",
        "gradient_accumulation_steps",
        "max_accumulated_minibatch",
        "log_interval",
        "weight_sync_interval",
        "weight_sync",
    ),
}
# Published names of the model, and of what it was trained from.
_MODEL_NAMES = ("base", "source")
_OURS = ("preset", "path", "name")


def translated(
    config: dict[str, Any], *, task_url: str | None, model: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """
    Args:
        config: the tables of the launcher's TOML.
        task_url: `data.endpoint_base_url`; it counts, as the launcher has tried it.
        model: `data.model` or `data.base_model`.

    Returns:
        The tables of a job of ours, and a sentence for each key that was not read.

    Raises:
        JobError: two models are named, or epochs are no numbers.
    """
    refuse_unwritable(config)
    tables = {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}
    warnings = tuple(_leave_out(tables))
    _name_model(tables, model)
    _count_iterations(tables)
    if task_url is not None:
        tables["services"] = {**_table(tables, "services"), "task_url": task_url}
    return tables, warnings


def _leave_out(tables: dict[str, Any]) -> Iterator[str]:
    for name, keys in NOT_READ.items():
        table = tables.get(name)
        if not isinstance(table, dict):
            continue
        for key in keys:
            if key in table:
                del table[key]
                yield f"{name}.{key} is for other backends and is not read"


def _name_model(tables: dict[str, Any], model: str | None) -> None:
    table = _table(tables, "model")
    named = [str(table.pop(key)) for key in _MODEL_NAMES if table.get(key) is not None]
    named += [model] if model is not None else []
    if len(set(named)) > 1:
        raise JobError(f"the launcher names two models, {named[0]!r} and {named[1]!r}: give one")
    if named and not any(key in table for key in _OURS):
        table["name" if HUB_NAME.fullmatch(named[0]) else "path"] = named[0]
    tables["model"] = table


def _count_iterations(tables: dict[str, Any]) -> None:
    """num_epochs * iterations_per_epoch is what training.iterations counts."""
    table = _table(tables, "training")
    epochs, each = table.pop("num_epochs", None), table.pop("iterations_per_epoch", None)
    if epochs is None and each is None:
        return
    factors = [1 if value is None else value for value in (epochs, each)]
    if not all(isinstance(value, int) for value in factors):
        raise JobError("training.num_epochs and training.iterations_per_epoch are whole numbers")
    table.setdefault("iterations", factors[0] * factors[1])
    tables["training"] = table


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    found = tables.get(name, {})
    if not isinstance(found, dict):
        raise JobError(f"{name} is {found!r:.80}, but it is a table")
    return dict(found)
