"""Searches for settings that make a job fit into the memory of its device and slow it down the least.

`propose` estimates the memory of combinations of settings (`learner.memory_plan`). `less_memory` only lists
settings that lower the memory, without an estimate, for example after an update that ran out of memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from service_kit.errors import ServiceError
from trainer_backend.errors import JobError
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import Placement, place, place_on_card
from trainer_backend.learner.memory import OVERHEAD, cached_row
from trainer_backend.learner.memory_plan import (
    MemoryPlan,
    Models,
    choose_vocabulary,
    memory_use,
    model_shapes,
    plan_on,
)
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.shapes import cached_config
from trainer_backend.models.folder import folder_config

GIB = 2**30
# New values of settings, by their keys in the job's TOML. The keys `lora` and `cluster` are whole tables.
Settings = Mapping[str, Any]
_TABLES = {"training": "training", "inference": "inference", "learner": "ranks"}
# Limits of the search. A cache for fewer than the first number of requests of maximal length slows sampling.
_ENOUGH_REQUESTS, _FEWEST_RUNNING, _SHORTEST = 8, 4, 256
_MOST_RANKS = 8
_SHARE = "inference.vllm.gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class Search:
    """Estimates the memory of a job with changed settings, on one device."""

    config: LearnerConfig
    placement: Placement
    own: Any = None
    """The transformers config of the model in training; None if memory cannot be estimated."""
    others: Sequence[Any] = ()
    """The transformers configs of the fixed policies that this machine serves too."""
    shortest: int | None = None
    """The lowest `inference.max_model_len` that may be proposed; None if it must not be changed."""
    _models: dict[tuple[bool, str], Models] = field(default_factory=dict)

    @property
    def is_planned(self) -> bool:
        return self.own is not None or bool(self._models)

    def models(self, config: LearnerConfig) -> Models:
        kind = (config.lora is None, config.training.critic)
        if kind not in self._models:
            self._models[kind] = model_shapes(config, self.own, self.others)
        return self._models[kind]

    def plan(self, config: LearnerConfig) -> MemoryPlan:
        """Return the memory plan for `config`; with several ranks, the plan of the rank that needs most."""
        table, models = config.ranks, self.models(config)
        ranks = (Ranks(index, table.ranks) for index in range(table.nproc_per_node))
        plans = [plan_on(self.placement, config, models, each) for each in ranks]
        return max(plans, key=lambda plan: plan.need)

    def server_least(self, config: LearnerConfig) -> int:
        """Return the bytes that a vLLM server needs at least on a GPU.

        These are its weights, the cache of one request of maximal length, and the memory of CUDA itself.
        """
        shape = self.models(config).own
        use = memory_use(config, self.placement, shape)
        held = shape.frozen_bytes(use.held) + cached_row(shape, use)
        return held // config.inference.server_devices + OVERHEAD

    def starves_servers(self, config: LearnerConfig) -> bool:
        """Return whether the configured share of GPU memory is too small for a vLLM server to start."""
        if not config.servers or self.placement.device.type != "cuda":
            return False
        return config.inference.server_share * self.placement.card_bytes() < self.server_least(config)


# One kind of change to a job, such as smaller micro-batches. A step yields its options, the mildest first.
Step = Callable[[Search, LearnerConfig], Iterator[Settings]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed settings, and the memory plan of the job with these settings."""

    settings: Settings
    plan: MemoryPlan
    fits: bool
    """Whether the job fits even if all sequences are as long as allowed."""

    def sentence(self) -> str:
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."

    def __str__(self) -> str:
        need, free = (f"{size / GIB:.1f}" for size in (self.plan.need, self.plan.free))
        with_them = " and ".join(write_setting(*item) for item in self.settings.items())
        each = " on each rank" if self.plan.ranks else ""
        if self.fits:
            return f"with {with_them} it needs {need} of {free} GiB{each}"
        if self.plan.shortage() is None:
            return (
                f"with {with_them} it runs, but needs {need} of {free} GiB for sequences as long as allowed"
            )
        return f"none of the tried settings is enough: with {with_them} it needs {need} of {free} GiB"


def propose(search: Search) -> Proposal:
    """Find settings that make the job fit into memory and slow it down the least.

    The steps of STEPS are applied in order, the cheapest first, until the job fits. Then each applied step is
    reconsidered, the most expensive first: it is withdrawn or made milder if the job still fits. Engines and
    servers get the remaining memory. If all steps together are not enough, the proposal contains all of them.
    """
    chosen = dict[Step, Settings]()
    for step in STEPS:
        config = _apply_all(search.config, chosen)
        options = list(_possible_options(search, step, config))
        if not options:
            continue
        chosen[step] = _find_fitting(search, config, options) or options[-1]
        if _fits(search, _apply_all(search.config, chosen)):
            break
    fits = _fits(search, _apply_all(search.config, chosen))
    if fits:
        _ease(search, chosen)
    settings = {
        key: value
        for own in chosen.values()
        for key, value in own.items()
        if not _is_current(search.config, key, value)
    }
    return Proposal(settings, search.plan(_apply_all(search.config, chosen)), fits)


def _ease(search: Search, chosen: dict[Step, Settings]) -> None:
    """Withdraw the steps of `chosen`, or choose milder options, if the job still fits. Changes `chosen`."""
    shared = (*_SHARED, *_SHARED_LEAST)
    # The steps of engines and servers first get the option with the least memory. They are considered again
    # at the end, when the remaining memory is known.
    for step, is_last in [(each, False) for each in reversed(STEPS)] + [(each, True) for each in shared]:
        if step not in chosen:
            continue
        others = {each: own for each, own in chosen.items() if each is not step}
        config = _apply_all(search.config, others)
        if _fits(search, config):
            del chosen[step]
            continue
        options = list(_possible_options(search, step, config))
        if step in shared and not is_last:
            options.reverse()
        chosen[step] = _find_fitting(search, config, options) or chosen[step]


def report_for_card(
    config: LearnerConfig, card: int, fixed: Sequence[Path] = (), *, shortest: int | None = None
) -> Iterator[str]:
    """Yield lines of text about the memory that the job would need on a CUDA GPU with `card` bytes.

    This machine need not have such a GPU. If the job fits only while sequences are short, the last line
    proposes settings.

    Args:
        fixed: the model folders of the fixed policies.
        shortest: as in `Search`.

    Raises:
        ModelFolderError: the config of the model is not on this machine.
        JobError: the job cannot run, because it does not fit even with short sequences, or vLLM gets too
            little memory.
    """
    others = [folder_config(folder) for folder in fixed]
    own = cached_config(config.model, choose_vocabulary(config, others))
    search = Search(config, place_on_card(card), own, others, shortest)
    plan = search.plan(config)
    yield from _table(plan)
    yield from plan.notes
    if config.inference.engine == "vllm" and not config.servers:
        yield "vLLM's servers are not part of this plan: the run does not start them on this machine"
    starving = search.starves_servers(config)
    if starving:
        yield (
            f"{_SHARE} = {config.inference.server_share:g} is too little for vLLM: it needs at least "
            f"{search.server_least(config) / GIB:.1f} GiB"
        )
    if plan.need <= plan.free and not starving:
        yield "everything fits at its fullest"
        return
    proposal = propose(search)
    if plan.shortage() is not None or starving:
        raise JobError(
            f"the job does not fit: {plan.need / GIB:.1f} of {plan.free / GIB:.1f} GiB",
            hint=proposal.sentence(),
        )
    yield f"it runs, but fits only with shorter sequences than allowed, or fewer; {proposal}"


def _table(plan: MemoryPlan) -> Iterator[str]:
    """Format a memory plan as lines of text: one for each kind of memory, and one for their sum."""
    whose = f", of {plan.ranks}" if plan.ranks else ""
    yield f"memory on {plan.placement}{whose}, in GiB:"
    lines = {**plan.needs.device, "sum": plan.need, "card": plan.free}
    lines |= {f"main memory: {kind}": size for kind, size in plan.needs.host.items()}
    width = max(map(len, lines))
    yield from (f"  {kind.ljust(width)} {size / GIB:8.2f}" for kind, size in lines.items())


def _fits(search: Search, config: LearnerConfig) -> bool:
    table = config.ranks
    if table.fsdp_cpu_offload if table.ranks == 1 else config.training.optimizer_offload:
        return False  # fsdp_cpu_offload needs several ranks; optimizer_offload a single process
    plan = search.plan(config)
    return plan.need <= plan.free and plan.shortage() is None and not search.starves_servers(config)


def _possible_options(search: Search, step: Step, config: LearnerConfig) -> Iterator[Settings]:
    """Yield the options of a step, and stop at the first whose memory cannot be estimated."""
    for settings in step(search, config):
        try:
            search.plan(with_settings(config, settings))
        except ServiceError:  # for example: a model without layers that adapters support
            return
        yield settings


def _find_fitting(search: Search, config: LearnerConfig, options: Sequence[Settings]) -> Settings | None:
    return next((each for each in options if _fits(search, with_settings(config, each))), None)


def _apply_all(config: LearnerConfig, chosen: Mapping[Step, Settings]) -> LearnerConfig:
    for settings in chosen.values():
        config = with_settings(config, settings)
    return config


def with_settings(config: LearnerConfig, settings: Settings) -> LearnerConfig:
    """Return a copy of `config` with the values in `settings`."""
    for key, value in settings.items():
        table, _, name = key.partition(".")
        if key == "lora":
            config = replace(config, lora=value)
        elif key == "cluster":  # each gateway then has a process of its own
            config = replace(config, processes=1 + config.engines)
        elif key == _SHARE:
            own = {
                other: kept
                for other, kept in config.inference.vllm.items()
                if not _SHARE.endswith(other.replace("-", "_"))
            }
            vllm = {**own, "gpu_memory_utilization": value}
            config = replace(config, inference=config.inference.model_copy(update={"vllm": vllm}))
        else:
            changed = getattr(config, _TABLES[table]).model_copy(update={name: value})
            config = replace(config, **{_TABLES[table]: changed})
    return config


def _is_current(config: LearnerConfig, key: str, value: Any) -> bool:
    table, _, name = key.partition(".")
    now = getattr(getattr(config, _TABLES[table]), name, None) if table in _TABLES else None
    return now == value and type(now) is type(value)  # one layer (1) is not all layers (True)


def write_setting(key: str, value: Any) -> str:
    """Format a setting as it is written in the job's TOML."""
    if key in ("lora", "cluster"):
        return f"[{key}]"
    return f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"


def _halves(value: int, least: int) -> list[int]:
    """Halve `value` repeatedly, down to `least`; return the results, without `value` itself."""
    halves = list[int]()
    while value > least:
        value = max(value // 2, least)
        halves.append(value)
    return halves


def _lower_cache(search: Search, config: LearnerConfig, *, requests: int) -> Iterator[Settings]:
    """Yield settings that make the cache of each local engine smaller.

    The size of a paged cache is set in GiB. It keeps space for `requests` requests of maximal length, or for
    all that the engine runs at once if these are fewer. Any other cache shrinks by storing fewer prefixes.
    """
    if not config.engines:
        return
    shape = search.models(config).own
    use = memory_use(config, search.placement, shape)
    if not use.paged:
        kept = config.inference.prefix_slots
        yield from ({"inference.kept_prefixes": value} for value in _halves(kept, 0))
        return
    plan, row = search.plan(config), cached_row(shape, use)
    now = plan.needs.device.get("cache", 0) / config.engines
    over = max(plan.need - plan.free, 0) / (config.engines + config.fixed_copies)
    least = math.ceil(min(requests, use.keys.slots) * row / GIB * 1000) / 1000
    left = math.floor((now - over) / GIB * 10) / 10
    yield from ({"inference.cache_gib": size} for size in (left, least) if least <= size < now / GIB)


def _lower_share(search: Search, config: LearnerConfig, *, requests: int) -> Iterator[Settings]:
    """Yield other shares of GPU memory for vLLM's servers, the largest first.

    The smallest share holds the weights and `requests` requests of maximal length.
    """
    if not config.servers or search.placement.device.type != "cuda":
        return
    card, share = search.placement.card_bytes(), config.inference.server_share
    plan = search.plan(config)
    taken = plan.needs.device.get("vllm", 0)
    servers = max(round(taken / (share * card)), 1)
    shape = search.models(config).own
    use = memory_use(config, search.placement, shape)
    rows = (requests - 1) * cached_row(shape, use) // config.inference.server_devices
    least = (search.server_least(config) + rows) / card
    left = share - (plan.need - plan.free) / servers / card
    least = math.ceil(least * 100) / 100
    if search.starves_servers(config):
        share = 1.0
    yield from ({_SHARE: value} for value in (math.floor(left * 100) / 100, least) if least <= value < share)


def _lower_micro_batches(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    """Yield smaller micro-batches, down to the tokens of one sequence of maximal length.

    Packed rows that would be wider than a micro-batch become as wide as it.
    """
    training, longest = config.training, config.inference.max_model_len
    for tokens in _halves(max(training.micro_batch, training.row_tokens), max(longest, 64)):
        rows = {"training.row_tokens": tokens} if tokens < training.row_tokens else {}
        yield {"training.micro_batch_tokens": tokens, **rows}


def _sleep(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    """Yield the setting with which vLLM on the learner's GPU frees its memory during updates."""
    if config.servers and not config.inference.sleep and not config.training.max_staleness:
        yield {"inference.sleep": True}


def _checkpoint_layers(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    """Yield gradient checkpointing of more layers: of each further quarter of the layers, then of all.

    If memory cannot be estimated, only all layers are yielded.
    """
    key, now = "training.gradient_checkpointing", config.training.gradient_checkpointing
    if now is True:
        return
    layers = search.models(config).own.layers if search.is_planned else 0
    quarters = sorted({layers * part // 4 for part in (1, 2, 3)})
    yield from ({key: count} for count in quarters if count > now)
    yield {key: True}


def _free_gathered(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    if not config.ranks.fsdp_reshard_after_forward:
        yield {"learner.fsdp_reshard_after_forward": True}


def _share_out_more(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    degree = config.ranks.data_parallel_replicate_degree
    yield from ({"learner.data_parallel_replicate_degree": value} for value in _halves(degree, 1))


def _offload_moments(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    is_here = search.placement.device.type == "cpu" or config.ranks.ranks > 1
    if not (is_here or config.training.optimizer_offload):
        yield {"training.optimizer_offload": True}


def _offload_shares(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    is_here = search.placement.device.type == "cpu" or config.ranks.ranks == 1
    if not (is_here or config.ranks.fsdp_cpu_offload):
        yield {"learner.fsdp_cpu_offload": True}


def _train_less(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    head = {"training.critic": "head"} if config.has_own_critic else {}
    if head:  # [lora] and several ranks are not possible with an own critic
        yield head
    if config.lora is None:
        yield {**head, "lora": LoraTable()}


def _run_fewer(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    if config.engines:
        running = config.inference.max_running
        yield from ({"inference.max_running": value} for value in _halves(running, _FEWEST_RUNNING))


def _shorten(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    """Yield lower values of `inference.max_model_len`, with rows and micro-batches that fit them."""
    training, longest = config.training, config.inference.max_model_len
    for length in _halves(longest, max(search.shortest or longest, _SHORTEST)):
        yield {
            "inference.max_model_len": length,
            "training.row_tokens": min(training.row_tokens, length),
            "training.micro_batch_tokens": max(min(training.micro_batch, length), 64),
        }


def _add_ranks(search: Search, config: LearnerConfig) -> Iterator[Settings]:
    """Yield a greater number of ranks, each with a GPU of this node.

    The number of GPUs is that of this machine, or _MOST_RANKS for a hypothetical GPU (`Placement.card`).
    """
    table, placement = config.ranks, search.placement
    if placement.device.type != "cuda" or table.nnodes > 1:
        return
    here = _MOST_RANKS if placement.card is not None else torch.cuda.device_count()
    alone: dict[str, Any] = {} if table.ranks > 1 else {"cluster": {}}
    if config.training.optimizer_offload:  # not possible with several ranks
        alone["training.optimizer_offload"] = False
    count = 2 * table.nproc_per_node
    while count <= here:
        yield {**alone, "learner.nproc_per_node": count}
        count *= 2


# Steps that reduce the memory of engines and servers: first only as far as sampling stays fast.
_SHARED: tuple[Step, ...] = tuple(
    partial(lower, requests=_ENOUGH_REQUESTS) for lower in (_lower_cache, _lower_share)
)
_SHARED_LEAST: tuple[Step, ...] = tuple(partial(lower, requests=1) for lower in (_lower_cache, _lower_share))
# All steps, in the order of the time that they cost, the cheapest first.
STEPS: tuple[Step, ...] = (
    *_SHARED,
    _lower_micro_batches,
    _sleep,
    _free_gathered,
    _share_out_more,
    _checkpoint_layers,
    _offload_moments,
    _offload_shares,
    _train_less,
    *_SHARED_LEAST,
    _run_fewer,
    _shorten,
    _add_ranks,
    partial(_offload_shares),  # a second time, because it needs several ranks
)


def less_memory(config: LearnerConfig) -> str:
    """Return a sentence that lists ways to need less memory, the cheapest first, without an estimate."""
    search = Search(config, place(config.model.device))
    steps = [step for step in STEPS if step not in (*_SHARED, *_SHARED_LEAST)]
    firsts = [next(step(search, config), None) for step in steps]
    knobs = [_name_change(config, settings) for settings in firsts if settings is not None]
    if config.engines:
        knobs.append("lower inference.max_model_len or kept_prefixes, whose cache is on the same device")
    if config.servers:
        knobs.append(f"lower {_SHARE} ({config.inference.server_share:g})")
    copies = max(config.engines, config.fixed_copies)
    if copies > 1:
        knobs.append(f"lower services.gateways ({copies}), each with a copy and a cache of its own")
    if config.fixed_copies:
        knobs.append("serve the fixed policy elsewhere, and name its rollout_only.inference_url")
    return f"To need less: {'; '.join(knobs)}."


def _name_change(config: LearnerConfig, settings: Settings) -> str:
    """Describe a change of settings in words, such as "lower KEY (OLD VALUE)" or "set KEY = VALUE"."""
    words = list[str]()
    for key, value in settings.items():
        if key in ("lora", "cluster"):
            words.append({"lora": "train adapters with [lora]", "cluster": "use [cluster]"}[key])
        elif isinstance(value, bool | str):
            words.append(f"set {write_setting(key, value)}")
        else:
            table, _, name = key.partition(".")
            now = getattr(getattr(config, _TABLES[table]), name)
            if now is None:
                now = config.training.micro_batch
            words.append(f"{'lower' if value < now else 'raise'} {key} ({now})")
    return " and ".join(words)
