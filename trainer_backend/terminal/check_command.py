"""`turnwise check` prints a job's values that are not defaults, and tries the job at its own task app."""

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trainer_backend import job_parts
from trainer_backend.collect.first_prompts import FirstPrompts
from trainer_backend.collect.trial import try_job
from trainer_backend.data.dataset import DataSet
from trainer_backend.errors import JobError, ModelFolderError
from trainer_backend.job.layers import DIGESTS
from trainer_backend.job.load import dump_job
from trainer_backend.job.plug_table import own_tables
from trainer_backend.job.rules import biases
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.terminal.templates import toml_value

_TABLE = re.compile(r"\[+([^\]]+)\]+")
_KEY = re.compile(r"([\w-]+) = ")
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?(GiB|GB)", re.IGNORECASE | re.ASCII)
# The comments with defaults begin to the right of all lines up to this length.
_COLUMN = 44


# A line of TOML, and a comment with the default if the value differs from it.
MarkedLine = tuple[str, str]


def own_choices(job: JobConfig) -> list[MarkedLine]:
    """Return TOML with only the values that differ from the defaults; it describes the same job.

    Digests of files are left out: with them, the printed job would refuse files that are edited later.
    """
    defaults = {key: text for key, text in _other_defaults(job) if key not in DIGESTS.values()}
    return _marked(_without_defaults(tomli.loads(dump_job(job)), defaults), defaults)


def whole_job(job: JobConfig) -> list[MarkedLine]:
    """Return the TOML of the job with every default filled in."""
    return _marked(tomli.loads(dump_job(job)), dict(_other_defaults(job)))


def _without_defaults(document: Mapping[str, Any], others: Container[str]) -> dict[str, Any]:
    """Return the document with only those keys and optional tables whose dotted names are in `others`.

    A table of which no key is left is left out too, unless `others` names it or it is in a list of tables.
    """
    rest: dict[str, Any] = {}
    for name, table in document.items():
        if isinstance(table, list):
            rest[name] = [
                {key: value for key, value in item.items() if f"{name}.{number}.{key}" in others}
                for number, item in enumerate(table)
            ]
        else:
            kept = {key: value for key, value in table.items() if f"{name}.{key}" in others}
            if kept or name in others:
                rest[name] = kept
    return rest


def _texts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the TOML of each table. Lists of tables are written with `[[header]]`, never inline."""
    for name, tables in document.items():
        if isinstance(tables, list):
            for table in tables:
                yield f"[[{name}]]\n" + tomli_w.dumps({name: table}).removeprefix(f"[{name}]\n")
        else:
            yield tomli_w.dumps({name: tables})


def _marked(document: Mapping[str, Any], defaults: Mapping[str, str]) -> list[MarkedLine]:
    """Return the TOML as lines. Aligned comments show the default of each value that differs from it."""
    table, marks, headers = "", list[tuple[str, str]](), Counter[str]()
    for line in "\n".join(_texts(document)).splitlines():
        if header := _TABLE.fullmatch(line):
            table = header.group(1)
            name, dot, inner = table.partition(".")
            headers[name] += line.startswith("[[")
            if headers[name]:
                table = f"{name}.{headers[name] - 1}{dot}{inner}"
            dotted = table
        else:
            key = _KEY.match(line)  # only the first line of a longer array has a key
            dotted = f"{table}.{key.group(1)}" if key else ""
        marks.append((line, f"  # default: {defaults[dotted]}" if dotted in defaults else ""))
    width = max((len(line) for line, mark in marks if mark and len(line) <= _COLUMN), default=0)
    return [(line.ljust(width) if mark else line, mark) for line, mark in marks]


def card_bytes(text: str) -> int:
    """Parse the size of a GPU's memory, such as `24GiB` or `80 GB`; return bytes."""
    size = _SIZE.fullmatch(text.strip())
    number = float(size[1]) if size else 0.0
    if size is None or not number:
        raise JobError(
            f"--memory is {text!r}, which is no size of a GPU's memory",
            hint="Write a number above 0 with its unit, GiB or GB, such as 24GiB: a card that is sold with "
            "24 GB has about 24 GiB.",
        )
    return int(number * (2**30 if size[2].lower() == "gib" else 10**9))


def lines_before_a_run(job: JobConfig, *, trial: bool, card: int | None = None) -> Iterator[str]:
    """Check a job's data, fixed policies and model before a run; yield lines of text about the findings.

    One line names the settings that bias the policy gradient.

    Args:
        trial: also try the job at its own task app, which executes the job's task_plugins.
        card: the memory of a GPU, in bytes; if given, also plan the job's memory on this GPU.

    Raises:
        JobError: the job cannot run.
    """
    data = job_parts.data(job)
    yield from data.notes if data is not None else ()
    folders: Mapping[str, Path] = {}
    if job.fixed_policies:
        from trainer_backend.run.preflight import checked_folders  # with torch, which takes seconds

        folders = checked_folders(job.fixed_policies, job.model)
        for name, folder in folders.items():
            yield f"fixed policy {name!r}: {folder}, which speaks as the actor"
    _refuse_unknown_to_model(job)
    yield from _chat(job)
    yield from _slow_sampling(job)
    yield from _slow_layers(job)
    if trial and job.services.task_url:
        yield f"not tried: environment and policies are of {', '.join(job.services.task_url)}"
    elif trial and job.rollout_only:
        yield "not tried at a task app: fixed policies have servers, which `train` starts"
    elif trial:
        yield from asyncio.run(_try_at_own_task_app(job, data))
    if data is not None and job.model.preset is None:  # a preset's tokenizer is made by the run
        yield from _long_rows(job, data)
    names = "; ".join(biases(job)) or "nothing that is known"
    yield f"expected policy gradient, biased by: {names} (docs/credit.md)"
    if card is not None:
        yield from _plan_for_card(job, card, [*folders.values()])


def _plan_for_card(job: JobConfig, card: int, fixed: Sequence[Path]) -> Iterator[str]:
    """Yield the plan of a job's memory on a CUDA GPU with `card` bytes, which this machine need not have.

    Raises JobError if the job cannot fit.
    """
    if job.model.device not in ("auto", "cuda"):
        yield f"the plan is that of model.device = 'cuda', and the job has {job.model.device!r}"
    from trainer_backend.learner.fit import report_for_card  # with torch, which takes seconds
    from trainer_backend.learner_parts import learner_config

    # Room for an answer, and for a prompt of the same length.
    shortest = 2 * job.rollout.max_tokens
    try:
        yield from report_for_card(learner_config(job), card, fixed, shortest=shortest)
    except ModelFolderError as error:
        yield f"memory is not planned, for it needs the model's config.json: {error}"


def _refuse_unknown_to_model(job: JobConfig) -> None:
    """Refuse layers and chat settings that the model does not have, if the model is on this machine."""
    if job.lora is not None and not job.lora.adapts_all:
        from trainer_backend.learner.shapes import refuse_unknown_targets  # with torch

        refuse_unknown_targets(job.model, job.lora)
    if not isinstance(job.training.gradient_checkpointing, bool):
        from trainer_backend.learner.shapes import refuse_more_layers  # with torch

        refuse_more_layers(job.model, job.training.gradient_checkpointing)
    if job.model.chat_template_kwargs:
        from trainer_backend.inference.rendering import ChatRenderer
        from trainer_backend.run.preflight import actors_tokenizer

        if (tokenizer := actors_tokenizer(job.model)) is not None:
            ChatRenderer(tokenizer).refuse_unread_settings(job.model.chat_template_kwargs)


def _chat(job: JobConfig) -> Iterator[str]:
    """Describe the model's chat template, if its tokenizer is on this machine. Presets are skipped."""
    if job.model.preset is not None:
        return
    from trainer_backend.inference.chat_check import describe_chat  # with torch
    from trainer_backend.run.preflight import actors_tokenizer

    try:
        tokenizer = actors_tokenizer(job.model)
        if tokenizer is not None:
            yield describe_chat(tokenizer)
    except ModelFolderError as error:  # perhaps the folder is on the machine that will train
        yield f"its chat template is not checked: {error}"


def _slow_sampling(job: JobConfig) -> Iterator[str]:
    """Warn that sampling is slower, if Triton's kernels do not run on this machine's GPU."""
    if job.model.device == "cpu" or not any(Path("/dev").glob("nvidia[0-9]*")):
        return
    from trainer_backend.inference.paged_attention import why_no_kernels  # with torch
    from trainer_backend.learner.device import place
    from trainer_backend.learner.memory_plan import slower_sampling

    yield from slower_sampling(why_no_kernels(place(job.model.device).device))


def _slow_layers(job: JobConfig) -> Iterator[str]:
    """Describe how the model is computed and which layers are slow, if its config is on this machine."""
    if job.model.preset is not None:
        return
    from trainer_backend.learner.device import place  # with torch
    from trainer_backend.learner.memory_plan import slower_layers
    from trainer_backend.learner.shapes import config_here, model_shape
    from trainer_backend.learner.ways import describe_ways
    from trainer_backend.models.kinds import missing_kernels, module_is_here
    from trainer_backend.models.text_part import empty_model

    if (config := config_here(job.model)) is not None:
        longest = job.inference.max_model_len
        shape = model_shape(config, None, longest=longest)
        yield f"{config.get_text_config().model_type}: {describe_ways(empty_model(config), longest=longest)}"
        device = place("auto").device.type if job.model.device == "auto" else job.model.device
        yield from slower_layers(device, shape.apart, missing_kernels(config, module_is_here))


def _long_rows(job: JobConfig, data: DataSet) -> list[str]:
    """Report rows of the data whose prompts are too long, if the model's tokenizer is on this machine."""
    prompts = FirstPrompts.of(job_parts.trial_planner(job, "check", data))
    if prompts is None:
        return []
    from trainer_backend.inference.rendering import ChatRenderer  # with torch, which takes seconds
    from trainer_backend.run.preflight import actors_tokenizer

    try:
        tokenizer = actors_tokenizer(job.model)
        return [] if tokenizer is None else prompts.report(ChatRenderer(tokenizer).find_long)
    except ModelFolderError as error:  # perhaps the folder is on the machine that will train
        return [f"rows are not measured: {error}"]


async def _try_at_own_task_app(job: JobConfig, data: DataSet | None) -> list[str]:
    lines: list[str] = []
    planner = job_parts.trial_planner(job, "check", data)
    with tempfile.TemporaryDirectory() as folder:
        async with job_parts.task_apps(
            job, Path(folder) / "task_app.log", data=data, tell=lines.append
        ) as apps:
            await try_job(planner, apps, from_scratch=True, preset=job.model.preset is not None)
    return [*lines, f"tried: {job.rollout.env_name!r} and its policies take what the job sends them"]


def _other_defaults(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each value that differs from its default, and the default as text.

    In a list of tables the key contains the index of the table, as in `rollout_only.0.weight`. The name of an
    optional table, such as `warmup`, is also yielded if the job has the table.
    """
    for name, field in JobConfig.model_fields.items():
        tables = getattr(job, name)
        model = table_model(field)
        if isinstance(tables, tuple):
            for number, table in enumerate(tables):
                yield from _of_a_table(f"{name}.{number}", table, model)
        elif tables is not None:
            if field.default is None:
                yield name, "none"
            yield from _of_a_table(name, tables, model)


def _of_a_table(name: str, table: Any, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for plug, kind, own in own_tables(model):
        values, fields = table.own(plug), {key: kind.model_fields[key] for key in own}
        changed = [*_changed_keys(f"{name}.{plug}", values, fields)]
        yield from [(f"{name}.{plug}", "none"), *changed] if changed else ()
    values = {key: getattr(table, key) for key in model.model_fields}
    yield from _changed_keys(name, values, model.model_fields)


def _changed_keys(
    name: str, values: Mapping[str, Any], fields: Mapping[str, FieldInfo]
) -> Iterator[tuple[str, str]]:
    for key, field in fields.items():
        default = field.get_default(call_default_factory=True)
        if values.get(key, default) != default:
            yield f"{name}.{key}", "none" if default in (None, PydanticUndefined) else toml_value(default)
