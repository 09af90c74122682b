"""What the tables of a mixture must say together, and what cannot go with one. Pure."""

from collections import Counter
from collections.abc import Iterator

from trainer_backend.core.adaptive import MAX_ALPHA, MIN_ALPHA
from trainer_backend.jobfile.mixture_table import AllocationTable, RolloutOnlyTable
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.urls import http_parts
from trainer_backend.plugins import LOSSES, allocation, estimator, policy_loss

Finding = tuple[str, str]  # a key, and a sentence about it
_SCHEDULE = "rollout_allocation_schedule"
_WEIGHTS = [key for key in RolloutOnlyTable.model_fields if key.startswith("behaviour_weight_")]


def mixture_findings(config: JobConfig) -> Iterator[Finding]:
    """Key and sentence for everything about fixed policies that would not do what it says."""
    yield from _names(config)
    schedule, active = config.rollout_allocation_schedule, config.fixed_policies
    if schedule is not None and not active:
        yield _SCHEDULE, f"[{_SCHEDULE}] has nobody to choose but the actor: {_not_active(config)}"
    if active and schedule is None:
        told = f"[rollout_only] {active[0].name!r} is active, and nothing says how often it samples; write"
        yield "rollout_only", f'{told} [{_SCHEDULE}] with type = "constant" and alpha = 0.5, for one half'
    if schedule is not None:
        yield from _keys_of_the_type(schedule)
        yield from _selection(schedule, active)
    for table in active:
        yield from _address(table)
        yield from _what_it_samples(config, table)
    yield from _what_cannot_be_mixed(config)


def _names(config: JobConfig) -> Iterator[Finding]:
    twice = [
        name for name, count in Counter(table.name for table in config.rollout_only).items() if count > 1
    ]
    if twice:
        told = "; give each [[rollout_only]] a 'name' of its own"
        yield "rollout_only", f"two fixed policies are called {twice[0]!r}{told}"


def _not_active(config: JobConfig) -> str:
    if not config.rollout_only:
        return "there is no [rollout_only]"
    return "[rollout_only] is active only when model_path, or inference_url, is set"


def _keys_of_the_type(table: AllocationTable) -> Iterator[Finding]:
    for key in sorted(allocation(table.type).needs):
        if getattr(table, key) in (None, ()):
            yield f"{_SCHEDULE}.{key}", f"{_SCHEDULE}.{key} is required with type = {table.type!r}"
    yield from _bounds(table)


def _bounds(table: AllocationTable) -> Iterator[Finding]:
    """That agree with each other; and adaptive learns from both, so it must begin with a chance of both."""
    first, low, high = table.alpha_0, table.min_alpha, table.max_alpha
    if table.type == "adaptive":
        low, high = (MIN_ALPHA if low is None else low), (MAX_ALPHA if high is None else high)
    if low is not None and high is not None and low > high:
        yield f"{_SCHEDULE}.min_alpha", f"{_SCHEDULE}.min_alpha ({low:g}) is above max_alpha ({high:g})"
    elif first is not None and high is not None and first > high:
        yield f"{_SCHEDULE}.alpha_0", f"{_SCHEDULE}.alpha_0 ({first:g}) is above max_alpha ({high:g})"
    if table.type != "adaptive":
        return
    if first is not None and low is not None and 0.0 < first < low:
        yield f"{_SCHEDULE}.alpha_0", f"{_SCHEDULE}.alpha_0 ({first:g}) is below min_alpha ({low:g})"
    if first in (0.0, 1.0):
        told = "adaptive compares the two, so it must begin with both: above 0 and below 1"
        yield f"{_SCHEDULE}.alpha_0", f"{_SCHEDULE}.alpha_0 is {first:g}; {told}"


def _selection(table: AllocationTable, active: tuple[RolloutOnlyTable, ...]) -> Iterator[Finding]:
    if table.selection == "weights":
        return
    if len(active) == 1:
        told = f"{_SCHEDULE}.selection = {table.selection!r} chooses among several fixed policies"
        yield f"{_SCHEDULE}.selection", f"{told}, and there is one, {active[0].name!r}"
    weighed = [item.name for item in active if item.weight != RolloutOnlyTable.model_fields["weight"].default]
    if weighed:
        told = f"[rollout_only] {weighed[0]!r}: weight is not read with {_SCHEDULE}.selection = 'reward'"
        yield "rollout_only.weight", told


def _address(table: RolloutOnlyTable) -> Iterator[Finding]:
    """Read with the job, before it is stored or told: a password in it would be too."""
    if table.inference_url is None:
        return
    try:
        http_parts(table.inference_url)
    except ValueError as error:
        yield "rollout_only", f"[rollout_only] {table.name!r}: inference_url {error}"


def _what_it_samples(config: JobConfig, table: RolloutOnlyTable) -> Iterator[Finding]:
    where, sampling = f"[rollout_only] {table.name!r}", config.sampling_of(table)
    if sampling.is_truncated and not config.rollout.allow_truncated_sampling:
        yield (
            "rollout_only",
            f"{where}: top_p < 1 or top_k > 0 gives log-probs on a part of the vocabulary, and the actor's "
            "on all of it; set rollout.allow_truncated_sampling = true to accept that",
        )
    if table.is_remote and table.logprobs != "processed" and (
        sampling.is_truncated or sampling.temperature != 1.0
    ):  # fmt: skip
        yield (
            "rollout_only",
            f"{where}: raw log-probs are not of what was sampled from at temperature "
            f"{sampling.temperature:g}, top_p {sampling.top_p:g} and top_k {sampling.top_k}: sample at 1, 1 "
            'and 0, or have the server return those it sampled with and set logprobs = "processed"',
        )
    if table.is_remote and config.model.preset is not None and not any(
        other.model_path is not None for other in config.fixed_policies
    ):  # fmt: skip
        yield (
            "rollout_only",
            f"{where} answers at a server, and model.preset = {config.model.preset!r} has no tokenizer to "
            "share with it; name the actor's model with model.path or model.name",
        )
    yield from _unread(config, table)


def _unread(config: JobConfig, table: RolloutOnlyTable) -> Iterator[Finding]:
    where, training = f"[rollout_only] {table.name!r}", config.training
    mode = table.behaviour_weight_mode or training.behaviour_weight_mode
    weights = [key for key in _WEIGHTS if getattr(table, key) is not None]
    if weights and table.objective == "single_ratio" and not table.train_value_head:
        told = "whose policy loss has the ratio to the fixed policy inside the clip, and no weight"
        yield "rollout_only", f"{where}: {weights[0]} is not read by objective = 'single_ratio', {told}"
    elif table.behaviour_weight_floor and mode != "mask":
        yield (
            "rollout_only",
            f"{where}: behaviour_weight_floor is not read by behaviour_weight_mode = {mode!r}",
        )
    if table.objective == "single_ratio" and not policy_loss(config.algorithm.loss).clips:
        others = ", ".join(name for name, plug in LOSSES.items() if plug.clips)
        yield (
            "rollout_only",
            f"{where}: objective = 'single_ratio' weighs its samples by the ratio in the loss, and "
            f"algorithm.loss = {config.algorithm.loss!r} has none: they would count as the actor's own; use "
            f"objective = 'decoupled' or 'reinforce', or one of the losses {others}",
        )
    plug, advantage = estimator(config.algorithm.advantage), config.algorithm.advantage
    if table.train_value_head and not plug.needs_values:
        told = f"needs a critic, which algorithm.advantage = {advantage!r} has not"
        yield "rollout_only", f"{where}: train_value_head {told}"
    if table.baseline == "per_policy" and not plug.compares_siblings:
        told = f"is not read by algorithm.advantage = {advantage!r}, which compares no siblings"
        yield "rollout_only", f"{where}: baseline = 'per_policy' {told}"


def _what_cannot_be_mixed(config: JobConfig) -> Iterator[Finding]:
    if not config.fixed_policies:
        return
    plug, name = estimator(config.algorithm.advantage), config.algorithm.advantage
    if plug.needs_branches:
        yield (
            "algorithm.advantage",
            f"algorithm.advantage = {name!r} measures what the actor would earn from a decision on, and "
            "[rollout_only] has others play; use another estimator",
        )
    if config.training.kl_reward_coef > 0:
        yield (
            "training.kl_reward_coef",
            "training.kl_reward_coef makes the actor pay for the KL of its own samples, and those of "
            "[rollout_only] are not drawn from it; kl_coef, in the loss, goes with both",
        )
