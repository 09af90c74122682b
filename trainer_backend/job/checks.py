"""Checks of a job beyond single keys: mixtures, keys without effect, and advice. No check reads the disk."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from shared_schemas.base import did_you_mean
from shared_schemas.state_keys import is_state_key, state_keys_of
from trainer_backend.core.adaptive import MAX_ALPHA, MIN_ALPHA
from trainer_backend.core.allocation import Weighted
from trainer_backend.core.keys import Table
from trainer_backend.errors import JobError
from trainer_backend.job.addresses import http_parts
from trainer_backend.job.mixture_table import AllocationTable, RolloutOnlyTable
from trainer_backend.job.rollout_table import RolloutTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import InferenceTable, LearnerTable, ModelTable
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.plugins import (
    AGGREGATIONS,
    LOSSES,
    READ_BY,
    aggregation,
    allocation,
    estimator,
    not_read,
    policy_loss,
)

Finding = tuple[str, str]  # a key, and a sentence about it
_AGENT_PREFIX = "agent:"  # of the environments that a task app makes of its operator's AGENTS
_SCHEDULE = "rollout_allocation_schedule"
_MOST_ASKED = 1_000  # iterations for which a schedule is tried
_WEIGHTS = [key for key in RolloutOnlyTable.model_fields if key.startswith("behaviour_weight_")]


def process_findings(config: JobConfig) -> Iterator[Finding]:
    """Yield key and sentence for each setting that the job's processes contradict or do not read."""
    memory = config.weight_transfer.backend == "memory"
    if memory and config.cluster is not None:
        yield (
            "weight_transfer.backend",
            "weight_transfer.backend = 'memory' copies weights within one process, and with [cluster] the "
            "learner and the engine have one each; known there: folder, and nccl to vLLM servers",
        )
    elif memory and config.inference.engine == "vllm":
        yield (
            "weight_transfer.backend",
            "weight_transfer.backend = 'memory' copies weights within one process, and inference.engine = "
            "'vllm' samples in others; known there: folder, nccl",
        )
    if config.weights_by_broadcast and config.inference.engine == "local":
        known = "folder" if config.cluster is not None else "memory, folder"
        yield (
            "weight_transfer.backend",
            "weight_transfer.backend = 'nccl' sends weights to vLLM servers, and inference.engine is "
            f"'local'; known there: {known}. Did you mean inference.engine = 'vllm'?",
        )
    if config.weights_by_broadcast and config.lora is not None:
        yield (
            "weight_transfer.backend",
            "weight_transfer.backend = 'nccl' sends all weights, and with [lora] the adapters alone change, "
            "which go by folder in a fraction of the bytes; known there: folder",
        )
    if config.training.critic == "own":
        yield from _of_an_own_critic(config)
    if config.training.skip_certain_above is not None:
        yield from _of_certain_segments(config)
    yield from _launcher_findings(config)
    if config.cluster is not None:
        yield from _rank_findings(config.learner, config.training, config.model)
    for key in type(config.learner).model_fields if config.cluster is None else ():
        if _is_set(config.learner, key):
            yield (
                f"learner.{key}",
                f"learner.{key} is of the learner's own process, and without [cluster] it has none. Did you "
                "mean to add [cluster]?",
            )


def _launcher_findings(config: JobConfig) -> Iterator[Finding]:
    """Check that whoever starts the processes has what they need, and nothing for somebody else."""
    if config.cluster is None:
        return
    launcher, inference = config.cluster.launcher, config.inference
    readers = {"ray_address": "launcher = 'ray'", "wait_s": "launcher = 'ray' or 'external'"}
    for key, reader in readers.items():
        if repr(launcher) not in reader and _is_set(config.cluster, key):
            yield (
                f"cluster.{key}",
                f"cluster.{key} is read with {reader}, and cluster.launcher is {launcher!r}. Did you mean "
                "launcher = 'ray'?",
            )
    if launcher == "external" and not config.learner.url:
        yield (
            "learner.url",
            "cluster.launcher = 'external' needs learner.url, the address of the learner that somebody else "
            'starts, such as "http://node3:9000" (docs/cluster.md)',
        )
    if launcher == "external" and inference.engine == "vllm" and not inference.urls:
        yield (
            "inference.urls",
            "cluster.launcher = 'external' starts no vLLM server: give inference.urls in place of "
            "vllm_python",
        )
    if launcher == "ray" and config.weights_by_broadcast and not inference.urls:
        yield (
            "weight_transfer.backend",
            "weight_transfer.backend = 'nccl' needs servers that reach the learner's machine, and those that "
            "cluster.launcher = 'ray' starts are known by ports of this one: give inference.urls, or use "
            "folder",
        )
    if launcher == "local" and config.learner.nnodes > 1:
        yield (
            "learner.nnodes",
            f"learner.nnodes is {config.learner.nnodes}, and cluster.launcher = 'local' starts nothing on "
            "another machine. Did you mean launcher = 'ray'?",
        )
    if launcher != "external" and config.learner.url:
        yield (
            "learner.url",
            "learner.url is the address of a learner that somebody else starts, and cluster.launcher = "
            f"{launcher!r} starts one. Did you mean launcher = 'external'?",
        )


def _of_an_own_critic(config: JobConfig) -> Iterator[Finding]:
    """Check what a critic with layers of its own cannot be combined with."""
    others = {
        "[lora]: the critic trains whole layers, and the policy's own are held": config.lora is not None,
        f"{config.learner.ranks} ranks of the learner: it is whole in one process": config.learner.ranks > 1,
        "[rollout_only]: it learns from the actor's samples alone": bool(config.fixed_policies),
    }
    for other, is_there in others.items():
        if is_there:
            yield "training.critic", f"training.critic = 'own' does not go with {other}; known there: head"


def _of_certain_segments(config: JobConfig) -> Iterator[Finding]:
    """Check what needs the segments that `training.skip_certain_above` omits."""
    key, training = "training.skip_certain_above", config.training
    if estimator(config.algorithm.advantage).needs_values and training.critic == "head":
        yield (
            key,
            f"{key} omits segments from the passes that training.critic = 'head' learns in; known there: "
            "absent. Did you mean training.critic = 'own'?",
        )
    if aggregation(training.aggregation).over == "iteration":
        others = ", ".join(name for name, plug in AGGREGATIONS.items() if plug.over != "iteration")
        yield (
            key,
            f"{key} omits segments, and training.aggregation = {training.aggregation!r} gives what is left "
            f"of an episode the weight of all of it; known there: {others}",
        )
    levels = {
        "algorithm.ratio_level": config.algorithm.ratio_level,
        "training.behaviour_weight_level": training.behaviour_weight_level,
    }
    for name, level in levels.items():
        if level == "episode":
            yield (
                key,
                f"{key} omits segments, and {name} = 'episode' multiplies over all tokens of an episode; "
                "known there: token, decision",
            )


# Keys of [learner] that several ranks read, and nobody else.
_OF_RANKS = ("data_parallel_replicate_degree", "fsdp_reshard_after_forward", "fsdp_cpu_offload")


def _rank_findings(learner: LearnerTable, training: TrainingTable, model: ModelTable) -> Iterator[Finding]:
    """Check what several ranks cannot do, and what one rank does not read."""
    fields, degree = LearnerTable.model_fields, learner.data_parallel_replicate_degree
    if learner.ranks == 1:
        for key in _OF_RANKS:
            if getattr(learner, key) != fields[key].default:
                yield (
                    f"learner.{key}",
                    f"learner.{key} is read by several ranks, and the learner has one. Did you mean to set "
                    "learner.nproc_per_node?",
                )
        return
    count = f"the learner has {learner.ranks} ranks (nproc_per_node times nnodes)"
    if learner.ranks % degree:
        divisors = [str(n) for n in range(1, learner.ranks + 1) if learner.ranks % n == 0]
        yield (
            "learner.data_parallel_replicate_degree",
            f"learner.data_parallel_replicate_degree is {degree}, and {count}, which cannot be cut into so "
            f"many equal groups; possible: {', '.join(divisors)}",
        )
    if training.optimizer_offload:
        yield (
            "training.optimizer_offload",
            f"training.optimizer_offload is of one process, and {count}. Did you mean "
            "learner.fsdp_cpu_offload = true?",
        )
    if model.device == "mps":
        yield "model.device", f"model.device is 'mps', and {count}; an Apple GPU serves one process alone"


def mixture_findings(config: JobConfig) -> Iterator[Finding]:
    """Yield key and sentence for each setting of fixed policies that contradicts another or has no effect."""
    yield from _names(config.rollout_only)
    schedule, active = config.rollout_allocation_schedule, config.fixed_policies
    if schedule is not None and not active:
        reason = "[rollout_only] is active only when model_path, or inference_url, is set"
        reason = reason if config.rollout_only else "there is no [rollout_only]"
        yield _SCHEDULE, f"[{_SCHEDULE}] has only the actor to choose: {reason}"
    if active and schedule is None:
        reason = f"[rollout_only] {active[0].name!r} is active, and nothing says how often it samples; write"
        yield "rollout_only", f'{reason} [{_SCHEDULE}] with type = "constant" and alpha = 0.5, for one half'
    if schedule is not None:
        yield from _of_the_type(schedule, config.training.iterations, config.job.seed)
        yield from _selection(schedule, active)
        yield from _looking_back(schedule, config.training)
    all_remote = all(table.is_remote for table in active)
    for table in active:
        yield from _address(table)
        yield from _sampling(config.rollout, table)
        if all_remote and config.model.preset is not None:
            yield (
                "rollout_only",
                f"[rollout_only] {table.name!r} answers at a server, and model.preset = "
                f"{config.model.preset!r} has no tokenizer to share with it; name the actor's model with "
                "model.path or model.name",
            )
        yield from _unread(table, config.training, config.algorithm)
    if active:
        yield from _what_cannot_be_mixed(config.training, config.algorithm)


def _names(tables: Sequence[RolloutOnlyTable]) -> Iterator[Finding]:
    twice = [name for name, count in Counter(table.name for table in tables).items() if count > 1]
    if twice:
        hint = "; give each [[rollout_only]] a 'name' of its own"
        yield "rollout_only", f"two fixed policies are called {twice[0]!r}{hint}"


def _of_the_type(table: AllocationTable, iterations: int, seed: int) -> Iterator[Finding]:
    needs = allocation(table.type).needs
    missing = sorted(needs - table.values(needs).keys())
    faults = [
        (f"{_SCHEDULE}.{key}", f"{_SCHEDULE}.{key} is required with type = {table.type!r}") for key in missing
    ]
    faults += _bounds(table)
    yield from faults or _what_it_answers(table, iterations, seed)


def _what_it_answers(table: AllocationTable, iterations: int, seed: int) -> Iterator[Finding]:
    """Ask a schedule for each iteration, twice, since one of the operator's own may do anything."""
    key = f"{_SCHEDULE}.type"
    try:
        first, again = (_alphas(table, iterations, seed, backwards=back) for back in (False, True))
    except JobError as error:
        yield key, f"{key} is {table.type!r}: {error}"
        return
    if other := [step for step, alpha in first.items() if again[step] != alpha]:
        step = other[0]
        yield (
            key,
            f"{key} is {table.type!r}, which answers otherwise when it is asked again: in step {step} alpha "
            f"was {first[step]:g} and {again[step]:g}. A schedule goes by the step and its arguments alone, "
            "so that a resumed run makes the same choices; an argument `seed` is the job's",
        )


def _bounds(table: AllocationTable) -> Iterator[Finding]:
    """Check that the bounds agree. Adaptive compares two policies, so it must start with a chance of both."""
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
        reason = "adaptive compares the two, so it must begin with both: above 0 and below 1"
        yield f"{_SCHEDULE}.alpha_0", f"{_SCHEDULE}.alpha_0 is {first:g}; {reason}"


def _selection(table: AllocationTable, active: tuple[RolloutOnlyTable, ...]) -> Iterator[Finding]:
    if table.selection == "weights":
        return
    if len(active) == 1:
        reason = f"{_SCHEDULE}.selection = {table.selection!r} chooses among several fixed policies"
        yield f"{_SCHEDULE}.selection", f"{reason}, and there is one, {active[0].name!r}"
    with_weight = [
        item.name for item in active if item.weight != RolloutOnlyTable.model_fields["weight"].default
    ]
    if with_weight:
        reason = (
            f"[rollout_only] {with_weight[0]!r}: weight is not read with {_SCHEDULE}.selection = 'reward'"
        )
        yield "rollout_only.weight", reason


def _address(table: RolloutOnlyTable) -> Iterator[Finding]:
    """Check the URL now, since the job is stored and shown later, with a password in it too."""
    if table.inference_url is None:
        return
    try:
        http_parts(table.inference_url)
    except ValueError as error:
        yield "rollout_only", f"[rollout_only] {table.name!r}: inference_url {error}"


def _sampling(rollout: RolloutTable, table: RolloutOnlyTable) -> Iterator[Finding]:
    where, sampling = f"[rollout_only] {table.name!r}", rollout.sampling_of(table)
    if sampling.is_truncated and not rollout.allow_truncated_sampling:
        yield (
            "rollout_only",
            f"{where}: {sampling.truncation} gives log-probs on a part of the vocabulary, and the actor's on "
            "all of it; set rollout.allow_truncated_sampling = true to accept that",
        )
    if table.is_remote and table.logprobs != "processed" and sampling.changes:
        yield (
            "rollout_only",
            f"{where}: raw log-probs are not those of samples with {sampling.changes}: leave it out, or have "
            'the server return those that it samples with and set logprobs = "processed"',
        )


def _unread(table: RolloutOnlyTable, training: TrainingTable, algorithm: AlgorithmTable) -> Iterator[Finding]:
    where = f"[rollout_only] {table.name!r}"
    mode = table.behaviour_weight_mode or training.behaviour_weight_mode
    weights = [key for key in _WEIGHTS if getattr(table, key) is not None]
    if weights and table.objective == "single_ratio" and not table.train_value_head:
        reason = "whose policy loss has the ratio to the fixed policy inside the clip, and no weight"
        yield "rollout_only", f"{where}: {weights[0]} is not read by objective = 'single_ratio', {reason}"
    elif table.behaviour_weight_floor and mode != "mask":
        yield (
            "rollout_only",
            f"{where}: behaviour_weight_floor is not read by behaviour_weight_mode = {mode!r}",
        )
    if table.objective == "single_ratio" and not policy_loss(algorithm.loss).clips:
        others = ", ".join(name for name, plug in LOSSES.items() if plug.clips)
        yield (
            "rollout_only",
            f"{where}: objective = 'single_ratio' weighs its samples by the ratio in the loss, and "
            f"algorithm.loss = {algorithm.loss!r} has none: they would count as the actor's own; use "
            f"objective = 'decoupled' or 'reinforce', or one of the losses {others}",
        )
    plug, advantage = estimator(algorithm.advantage), algorithm.advantage
    if table.train_value_head and not plug.needs_values:
        reason = f"needs a critic, which algorithm.advantage = {advantage!r} has not"
        yield "rollout_only", f"{where}: train_value_head {reason}"
    if table.baseline == "per_policy" and not plug.compares_siblings:
        reason = f"is not read by algorithm.advantage = {advantage!r}, which compares no siblings"
        yield "rollout_only", f"{where}: baseline = 'per_policy' {reason}"


def _looking_back(schedule: AllocationTable, training: TrainingTable) -> Iterator[Finding]:
    if training.max_staleness:
        by_reward = schedule.selection == "reward"
        chosen = "selection = 'reward'" if by_reward else f"type = {schedule.type!r}"
        if by_reward or allocation(schedule.type).looks_back:
            yield (
                "training.max_staleness",
                f"training.max_staleness = {training.max_staleness} plans iterations before earlier ones are "
                f"over, and [{_SCHEDULE}] {chosen} looks back on those; set max_staleness = 0",
            )


def _what_cannot_be_mixed(training: TrainingTable, algorithm: AlgorithmTable) -> Iterator[Finding]:
    plug, name = estimator(algorithm.advantage), algorithm.advantage
    if plug.needs_branches:
        yield (
            "algorithm.advantage",
            f"algorithm.advantage = {name!r} measures what the actor would earn from a decision on, and "
            "[rollout_only] has others play; use another estimator",
        )
    if training.kl_reward_coef > 0:
        yield (
            "training.kl_reward_coef",
            "training.kl_reward_coef makes the actor pay for the KL of its own samples, and those of "
            "[rollout_only] are not drawn from it; kl_coef, in the loss, goes with both",
        )


def advice(config: JobConfig) -> list[str]:
    """Return a sentence for each setting of a valid job that is probably a mistake."""
    training = config.training
    findings = []
    if training.step_rewards_beta > 0 and training.step_rewards_horizon == "realised":
        findings.append(
            "training.step_rewards_beta with the realised length looks into the future; "
            'step_rewards_horizon = "max_decisions" makes it causal'
        )
    if not training.step_rewards_enabled and training.step_rewards_mode != "off":
        findings.append(
            f"training.step_rewards_mode is {training.step_rewards_mode!r}, but step_rewards_enabled is "
            "false: only the outcome is rewarded"
        )
    mode, by_outcome = training.reward_mode, config.algorithm.episode_score == "outcome"
    if config.rollout.reward_function is not None and mode != "off" and not by_outcome:
        findings.append(
            f"rollout.reward_function with training.step_rewards_mode = {mode!r}: its base_reward is added "
            "to each decision, and its score is told but trains nothing; with an estimator that has episode "
            "scores, algorithm.episode_score = 'outcome' trains on both"
        )
    plug, name = estimator(config.algorithm.advantage), config.algorithm.advantage
    if training.group_size == 1 and not plug.needs_values and not plug.needs_branches:
        findings.append(
            "training.group_size is 1: group-relative advantages are all 0, nothing will be learned"
        )
    if plug.needs_branches and config.rollout.max_turns == 1 and training.group_size > 1:
        findings.append(
            f"rollout.max_turns is 1: algorithm.advantage = {name!r} asks for no branches from a first "
            "decision, whose branches are its siblings, so every decision is compared as in 'stepwise'"
        )
    findings += _of_the_kl(training, config.algorithm)
    if training.refill_rounds:
        findings.append(
            "training.refill_rounds replaces worlds without spread (always or never solved) by others: what "
            "is learned from is chosen by its outcome, a named bias (docs/credit.md)"
        )
    if training.skip_certain_above is not None:
        findings += _of_what_certain_segments_say(config)
    findings += _of_the_states(config.algorithm)
    if by_outcome and not (plug.needs_state_keys or plug.needs_texts):
        findings.append(
            f"algorithm.episode_score = 'outcome' with algorithm.advantage = {name!r}, which reads scores "
            "alone: what decisions earn beside the outcome (step rewards, penalties, KL) trains nothing"
        )
    findings += _unlike_the_paper(training, config.algorithm)
    findings += _of_a_mixture(config)
    usual, fall = TrainingTable.model_fields["learning_rate_final"].default, training.learning_rate_schedule
    unread = not_read("training.learning_rate_schedule", fall)
    if "training.learning_rate_final" in unread and training.learning_rate_final != usual:
        findings.append(
            f"training.learning_rate_final = {training.learning_rate_final} is never reached: with "
            f'learning_rate_schedule = "{fall}" the rate does not fall'
        )
    return findings


def _of_the_states(algorithm: AlgorithmTable) -> Iterator[str]:
    name, key = algorithm.advantage, algorithm.state_hashing_function
    if estimator(name).needs_state_keys and key == "text_history":
        yield (
            f"algorithm.advantage = {name!r} compares decisions in equal states, and those of "
            f"state_hashing_function = {key!r} hold all that was seen before: hardly any is met twice "
            "(anchors/singleton_frac is the share that is not)"
        )


def _of_what_certain_segments_say(config: JobConfig) -> Iterator[str]:
    """Name the terms that do without the segments that `training.skip_certain_above` omits."""
    key, training, advantage = "training.skip_certain_above", config.training, config.algorithm.advantage
    if not estimator(advantage).needs_values:
        yield (
            f"{key} with algorithm.advantage = {advantage!r}, which has no critic: only where the advantages "
            "of a state are 0 on average is what it omits small (docs/credit.md). Did you mean advantage = "
            "'gae' with training.critic = 'own'?"
        )
    terms = [f"training.{name}" for name in ("entropy_coef", "kl_coef") if getattr(training, name)]
    if terms:
        yield (
            f"{key} omits certain decisions from {' and '.join(terms)} too, which then do not hold the "
            "policy back where it is most certain"
        )
    if config.fixed_policies:
        yield (
            f"{key} omits segments of the actor alone: those of [rollout_only] weigh more beside what is left"
        )


def _of_the_kl(training: TrainingTable, algorithm: AlgorithmTable) -> list[str]:
    name = algorithm.advantage
    plug = estimator(name)
    findings = []
    if training.kl_reward_coef and plug.divides_by_std and algorithm.fnorm == "std":
        findings.append(
            f"training.kl_reward_coef with algorithm.advantage = {name!r}, which divides by a standard "
            "deviation: where siblings earned the same, the KL alone is blown up to advantages of size 1, "
            "whatever the coefficient; use an estimator that does not divide"
        )
    if training.kl_coef and training.kl_reward_coef:
        findings.append(
            "training.kl_coef and training.kl_reward_coef pull to the same model twice, in the loss and in "
            "r_t; one of them is enough"
        )
    if training.kl_reward_coef and training.kl_reward_kind != "k1":
        findings.append(
            f"training.kl_reward_kind = {training.kl_reward_kind!r} hardly holds a policy that is near the "
            'reference: as a reward only "k1" has the gradient of the KL'
        )
    return findings


def _unlike_the_paper(training: TrainingTable, algorithm: AlgorithmTable) -> Iterator[str]:
    """Compare a paper's estimator and loss with its other values; the job may have set them for others."""
    tables = {"algorithm": algorithm, "training": training}
    chosen = {
        "advantage": (algorithm.advantage, estimator(algorithm.advantage).values),
        "loss": (algorithm.loss, policy_loss(algorithm.loss).values),
    }
    for board, (name, values) in chosen.items():
        actual = {key: getattr(tables[key.partition(".")[0]], key.partition(".")[2]) for key in values}
        other = [
            f"{key} = {actual[key]!r} (there {value!r})"
            for key, value in values.items()
            if actual[key] != value
        ]
        if other:
            yield f"algorithm.{board} = {name!r} with other values than its paper's: {', '.join(other)}"


def biases(config: JobConfig) -> list[str]:
    """Name each key that biases the expected gradient of the first optimizer step; none: it is unbiased.

    Later steps of an iteration are clipped around the sampling policy, which is no bias of the credit.

    Source: DESIGN.md 4.6; enumerated in tests/trainer_backend/core/test_unbiased.py.
    """
    algorithm, training = config.algorithm, config.training
    plug = estimator(algorithm.advantage)
    findings = [f"algorithm.advantage = {algorithm.advantage!r} ({plug.bias})"] if plug.bias else []
    for key in ("gae_lambda", "gae_token_lambda"):
        if key in plug.keys.model_fields and getattr(algorithm, key) < 1.0:
            findings.append(f"algorithm.{key} = {getattr(algorithm, key):g} (trusts the critic)")
    if algorithm.bootstrap_truncated:
        findings.append("algorithm.bootstrap_truncated = true (trusts the critic)")
    if aggregation(training.aggregation).is_biased:
        findings.append(f"training.aggregation = {training.aggregation!r} (sampled denominators)")
    if algorithm.gamma < 1.0:
        findings.append(f"algorithm.gamma = {algorithm.gamma:g} (discount)")
    if training.refill_rounds:
        findings.append(f"training.refill_rounds = {training.refill_rounds} (worlds chosen by their outcome)")
    if training.skip_certain_above is not None:
        findings.append(
            f"training.skip_certain_above = {training.skip_certain_above:g} (of certain decisions, only what "
            "was sampled against the odds)"
        )
    if config.rollout.is_truncated:
        findings.append("rollout.allow_truncated_sampling = true (probability that is never sampled)")
    if training.max_staleness:
        findings.append(
            f"training.max_staleness = {training.max_staleness} (truncated weights of older samples)"
        )
    if config.fixed_policies:
        findings.append("[rollout_only] (truncated weights; docs/mixture.md)")
    return findings


def _of_a_mixture(config: JobConfig) -> list[str]:
    schedule, active = config.rollout_allocation_schedule, config.fixed_policies
    findings = [
        f"[rollout_only] {item.name!r} is not active and samples nothing: neither model_path nor "
        "inference_url is set"
        for item in config.rollout_only
        if not item.is_active
    ]
    if schedule is None or not active:
        return findings
    prefix = "rollout_allocation_schedule: alpha, the actor's share, is"
    by_step = _alphas(schedule, config.training.iterations, config.job.seed)
    alphas = set() if allocation(schedule.type).looks_back else {*by_step.values()}
    if alphas == {1.0}:
        findings.append(f"{prefix} 1 in every iteration: no policy of [rollout_only] ever samples")
    if alphas == {0.0}:
        findings.append(
            f"{prefix} 0 in every iteration: the actor never samples, so evaluations alone tell how it plays"
        )
    alone = [item.name for item in active if item.baseline == "per_policy"]
    if alone and schedule.unit != "rollout":
        findings.append(
            f"[rollout_only] {alone[0]!r}: baseline = 'per_policy' makes no difference where siblings share "
            f'their policy; rollout_allocation_schedule.unit is {schedule.unit!r}, and "rollout" mixes them'
        )
    return findings


def _alphas(
    table: AllocationTable, iterations: int, seed: int, *, backwards: bool = False
) -> dict[int, float]:
    """Return the share of the actor in each iteration; in a very long job, in those that tell most.

    A schedule that looks back is asked for the first one alone.

    Raises:
        JobError: the schedule fails, or answers with something else.
    """
    plug = allocation(table.type)
    schedule = plug.schedule(table.values(plug.needs | plug.takes), seed=seed, selection=Weighted())
    last = min(iterations, 1) if plug.looks_back else iterations
    steps = {*range(1, min(last, _MOST_ASKED) + 1), last, *table.switch_steps}
    asked = (step for step in sorted(steps, reverse=backwards) if 1 <= step <= last)
    return {step: schedule.alpha_at(step) for step in asked}


# Keys that get advice instead, or stand in every job so that jobs that differ in one name can be compared.
_ALWAYS_ALLOWED = frozenset({"training.clip_low", "training.clip_high", "training.learning_rate_final"})


def unknown_state_keys(rollout: RolloutTable, algorithm: AlgorithmTable) -> Iterator[Finding]:
    """Yield key and sentence for each state key that the environment lacks.

    Only the task app knows those of a plug-in's environment; it is asked when the run starts.
    """
    env_name = rollout.env_name
    state_keys = state_keys_of(env_name)
    names = [("rollout.state_keys", name) for name in rollout.state_keys]
    names.append(("algorithm.state_hashing_function", algorithm.state_hashing_function))
    for key, name in names:
        if state_keys is not None and not is_state_key(name, state_keys):
            yield key, f"{key}: {env_name!r} has no state key {name!r}{did_you_mean(name, state_keys)}"


def agent_findings(config: JobConfig) -> Iterator[Finding]:
    """Yield key and sentence for each setting that an agent in a process of its own cannot have.

    A task app refuses the same of each rollout (`task_app/captures/worker.py`), which is only met in play.
    """
    if not config.rollout.env_name.startswith(_AGENT_PREFIX):
        return
    parts = {
        "algorithm.bootstrap_truncated": config.algorithm.bootstrap_truncated,
        "algorithm.advantage": estimator(config.algorithm.advantage).needs_branches,
        "multi_turn.enable": config.multi_turn.enable,
        "rollout.termination_regex": config.rollout.termination_regex is not None,
        "rollout.invalid_action_penalty": config.rollout.invalid_action_penalty != 0,
    }
    for key, stands_in_job in parts.items():
        if stands_in_job:
            table, name = key.split(".")
            yield (
                key,
                f"{key} = {json.dumps(getattr(getattr(config, table), name))} has no effect on "
                f"{config.rollout.env_name!r}, an agent that makes its own prompts and state "
                "(docs/captures.md)",
            )


def unread_keys(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield key and sentence for each key with a value other than its default that nothing reads."""
    algorithm, training = config.algorithm, config.training
    yield from ((key, sentence) for _, key, sentence in not_read_with(config))
    yield from _not_read_by_the_engine(config.inference)
    if config.rollout.reward_function is not None and estimator(algorithm.advantage).needs_branches:
        yield (
            "rollout.reward_function",
            "rollout.reward_function judges whole episodes, and algorithm.advantage = "
            f"{algorithm.advantage!r} compares what is played on from the middle of one",
        )
    modes = [table.behaviour_weight_mode for table in config.fixed_policies]
    if training.behaviour_weight_floor and "mask" not in (training.behaviour_weight_mode, *modes):
        yield (
            "training.behaviour_weight_floor",
            f"training.behaviour_weight_floor is not read by behaviour_weight_mode = "
            f"{training.behaviour_weight_mode!r}; known to: mask",
        )
    for coef, kind in (("kl_coef", "kl_kind"), ("kl_reward_coef", "kl_reward_kind")):
        if getattr(training, kind) != TrainingTable.model_fields[kind].default and not getattr(
            training, coef
        ):
            yield f"training.{kind}", f"training.{kind} is not read while training.{coef} is 0"
    if algorithm.default_step_reward and training.reward_mode != "off":
        yield (
            "algorithm.default_step_reward",
            "algorithm.default_step_reward is for decisions without rewards of their own; "
            f"training.step_rewards_mode is {training.reward_mode!r}",
        )


def not_read_with(config: JobConfig) -> Iterator[tuple[str, str, str]]:
    """Check the keys of `plugins.reads` against the names that the job chooses.

    Yields:
        The key of the choice, such as algorithm.advantage, a key that it does not read, and a sentence.
    """
    for board in READ_BY:
        table, _, key_of_name = board.partition(".")
        if getattr(config, table) is None:
            continue
        name = getattr(getattr(config, table), key_of_name)
        for key, readers in not_read(board, name).items():
            home, _, name_of_key = key.partition(".")
            if key in _ALWAYS_ALLOWED or not _is_set(getattr(config, home), name_of_key):
                continue
            choice = f"{key_of_name if table not in ('algorithm', 'training') else board} = {name!r}"
            reason = f"is not read by {choice}"
            if board == "algorithm.advantage" and key.startswith(("training.value_", "training.critic")):
                reason = f"needs a critic, which {choice} has not"
            yield board, key, f"{key} {reason}; known to: {', '.join(readers)}"


def _not_read_by_the_engine(table: InferenceTable) -> Iterator[Finding]:
    """Check the keys about vLLM servers, and about those that the run starts."""
    readers = {
        "weight_update": "engine = 'vllm'",
        "replica_wait_s": "engine = 'vllm'",
        **dict.fromkeys(("replicas", "vllm_python", "vllm"), "engine = 'vllm' without urls"),
    }
    for key, reader in readers.items():
        unread = table.engine == "local" or (table.urls and reader.endswith("urls"))
        if unread and _is_set(table, key):
            yield f"inference.{key}", f"inference.{key} is read with {reader}, and nothing reads it here"


def _is_set(table: Table, key: str) -> bool:
    """Return whether the key of the table differs from its default."""
    return key in type(table).model_fields and bool(
        getattr(table, key) != type(table).model_fields[key].get_default(call_default_factory=True)
    )
