"""All rules between keys of a job that need no task app; rule.py describes the format of the tables below.

They are checked when a job is posted, by the dashboard's form, by `turnwise check`, and when a run starts. A
condition on a single key is not here: it is a bound or a validator of the key's field.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from shared_schemas.base import did_you_mean
from shared_schemas.rollouts import CostKeys
from shared_schemas.state_keys import is_state_key, list_state_keys
from shared_schemas.trajectory import TRUNCATING
from trainer_backend.core.adaptive import MAX_ALPHA, MIN_ALPHA
from trainer_backend.core.allocation import Weighted
from trainer_backend.core.seeds import evaluation_worlds
from trainer_backend.errors import JobError
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.rollout_table import SET_BY_ROWS, MultiTurnTable
from trainer_backend.job.rule import (
    Case,
    Finding,
    Kind,
    Rule,
    Term,
    has,
    is_key,
    never,
    read_readers,
    read_table,
    that,
)
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import TASK_APP_SETTINGS, LearnerTable
from trainer_backend.plugins import READ_BY, allocation, estimator, not_read, policy_loss

_ADVANTAGE, _SCHEDULE = "algorithm.advantage", "rollout_allocation_schedule"
_STATE_KEY = "algorithm.state_hashing_function"
_MOST_ASKED = 1_000  # a schedule is tried for all iterations up to this one
# Keys that are accepted even if nothing reads them, because advice reports them, or because it is useful that
# jobs which are compared share them.
_ALWAYS_ALLOWED = frozenset({"training.clip_low", "training.clip_high", "training.learning_rate_final"})

_OF_FORKS = frozenset({"algorithm.branches_per_episode", "algorithm.branch_rollouts"})


def _that_policy(test: Callable[[JobConfig, RolloutOnlyTable], bool], *names: str) -> Term:
    keys = tuple(f"rollout_only.{name}" for name in names)
    return Term(keys, lambda case: case.policy is not None and test(case.config, case.policy))


def _that_discounts(key: str) -> Term:
    def test(config: JobConfig) -> bool:
        return (
            key in estimator(config.algorithm.advantage).keys.model_fields
            and getattr(config.algorithm, key) < 1.0
        )

    return that(test, f"algorithm.{key}", _ADVANTAGE, needs="plugs")


def _is_cut(config: JobConfig, policy: RolloutOnlyTable) -> bool:
    """Return whether the keys of the fixed policy itself truncate its sampling.

    Truncation that it gets from [rollout] is the subject of another rule.
    """
    has_own = any(getattr(policy, key) is not None for key in TRUNCATING)
    return has_own and config.rollout.choose_sampling(policy).is_truncated


def _alphas(config: JobConfig, *, backwards: bool = False) -> dict[int, float]:
    """Return the probability that the actor samples (alpha) by iteration.

    In a very long job, some iterations are left out. A schedule that needs earlier outcomes is asked only
    about the first iteration. The result is empty if keys of the schedule are missing or contradict
    each other.

    Args:
        backwards: ask the schedule about the last iteration first.

    Raises:
        JobError: the schedule fails, or returns no probability.
    """
    table, iterations = config.rollout_allocation_schedule, config.training.iterations
    if table is None or any(_missing(config)) or any(_wrong_bounds(config)):
        return {}
    plug = allocation(table.type)
    schedule = plug.schedule(
        table.values(plug.needs | plug.takes), seed=config.job.seed, selection=Weighted()
    )
    last = min(iterations, 1) if plug.looks_back else iterations
    steps = {*range(1, min(last, _MOST_ASKED) + 1), last, *table.switch_steps}
    asked = (step for step in sorted(steps, reverse=backwards) if 1 <= step <= last)
    return {step: schedule.alpha_at(step) for step in asked}


def _that_alpha(alpha: float) -> Term:
    def test(config: JobConfig) -> bool:
        table = config.rollout_allocation_schedule
        if not config.fixed_policies or table is None or allocation(table.type).looks_back:
            return False
        return {*_alphas(config).values()} == {alpha}

    shown = f"{_SCHEDULE}: alpha, the actor's share, is {alpha:g} in every iteration"
    return that(test, f"{_SCHEDULE}.type", "rollout_only", shown=shown, needs="plugs")


CONDITIONS = {
    "several ranks": that(
        lambda c: c.learner.ranks > 1,
        *("learner.nproc_per_node", "learner.nnodes"),
        shown="{learner.ranks} ranks of the learner (nproc_per_node times nnodes)",
    ),
    "one rank": that(
        lambda c: c.cluster is not None and c.learner.ranks == 1,
        *("learner.nproc_per_node", "learner.nnodes"),
        shown="one rank of the learner",
    ),
    "optional calls": that(
        lambda c: not c.rollout.forces_call, "rollout.policy_config", shown="optional calls"
    ),
    "truncated sampling": that(
        lambda c: c.rollout.is_truncated,
        *(f"rollout.{key}" for key in TRUNCATING),
        shown="[rollout] {rollout.truncation}",
    ),
    # Whether the environment is one that the task app makes from its operator's AGENTS. The task app itself
    # refuses the same settings (task_app/captures/worker.py), but only when a rollout is played.
    "agent": that(lambda c: c.rollout.env_name.startswith("agent:"), "rollout.env_name"),
    "lambda": _that_discounts("gae_lambda"),
    "token lambda": _that_discounts("gae_token_lambda"),
    "a mask": that(
        lambda c: (
            "mask" in (c.training.behaviour_weight_mode, *(t.behaviour_weight_mode for t in c.fixed_policies))
        ),
        "training.behaviour_weight_mode",
    ),
    "its mask": _that_policy(
        lambda c, policy: (policy.behaviour_weight_mode or c.training.behaviour_weight_mode) == "mask",
        "behaviour_weight_mode",
    ),
    "its truncated sampling": _that_policy(_is_cut, *TRUNCATING),
    "another distribution": _that_policy(
        lambda c, policy: bool(c.rollout.choose_sampling(policy).changes), "temperature", *TRUNCATING
    ),
    "all at servers": that(
        lambda c: all(t.is_remote for t in c.fixed_policies),
        "rollout_only.model_path",
        shown="no policy in a folder",
    ),
    "one policy": that(lambda c: len(c.fixed_policies) == 1, "rollout_only", shown="one [rollout_only]"),
    "alpha 0": _that_alpha(0.0),
    "alpha 1": _that_alpha(1.0),
}
_LEARNER_KEYS = " ".join(f"learner.{key}" for key in LearnerTable.model_fields if key != "url")
_MULTI_TURN_KEYS = " ".join(f"multi_turn.{key}" for key in MultiTurnTable.model_fields if key != "enable")
_READERS = f"""
inference.urls inference.weight_update inference.replica_wait_s inference.sleep: inference.engine = "vllm"
inference.replicas inference.vllm_python inference.vllm: inference.engine = "vllm" & no inference.urls
cluster.ray_address: cluster.launcher = "ray"
cluster.wait_s: cluster.launcher = ["ray", "external"]
learner.url: cluster.launcher = "external"
{_LEARNER_KEYS}: cluster
{_MULTI_TURN_KEYS}: multi_turn.enable = true
multi_turn.context_tools: multi_turn.statelm_enabled = true
training.kl_kind: training.kl_coef
training.kl_reward_kind: training.kl_reward_coef
algorithm.fork_rule: algorithm.train_branches = true
rollout_only.api_key_env rollout_only.logprobs: rollout_only.inference_url
"""
_COSTS = " | ".join(f"rollout.{key}" for key in CostKeys.model_fields)
_NOT_READ = f"""
training.learning_rate_rise & training.learning_rate_schedule = "desired_kl"
    the rate begins at learning_rate, and small steps at first would be taken for a rate that is too low
algorithm.bootstrap_truncated | multi_turn.enable | rollout.termination_regex |
{_COSTS} | algorithm.advantage: needs_branches & <agent>
    it has no effect on an agent that makes its own prompts and state (docs/captures.md)
learner.data_parallel_replicate_degree | learner.fsdp_reshard_after_forward |
learner.fsdp_cpu_offload & <one rank>
    several read it. Did you mean to set learner.nproc_per_node?
rollout_only.model & no rollout_only.inference_url
    it is the model's name at an inference_url. Did you mean model_path?
rollout_only.behaviour_weight_cap | rollout_only.behaviour_weight_floor |
rollout_only.behaviour_weight_level | rollout_only.behaviour_weight_mode &
rollout_only.objective = "single_ratio" & no rollout_only.train_value_head
    its policy loss has the ratio to the fixed policy inside the clip, and no weight
training.behaviour_weight_floor & no <a mask>
    it is known to: "mask", here or of a fixed policy
rollout_only.behaviour_weight_floor > 0 & no <its mask>
    it is known to: "mask"
rollout_only.train_value_head & no algorithm.advantage: needs_values
    it needs a critic, as 'gae' has
algorithm.default_step_reward & no training.step_rewards_mode = "off" & training.step_rewards_enabled = true
    it is for decisions without rewards of their own
rollout_only.baseline = "per_policy" & no algorithm.advantage: compares_siblings
    it compares no siblings
rollout_allocation_schedule.selection = "reward" & <one policy>
    it chooses among several
rollout_only.weight & rollout_allocation_schedule.selection = "reward"
    it does not read the weight
"""
_REFUSALS = """
inference.own_process & inference.engine = "vllm"
    it is of the local engine: leave it out
inference.replay_experts & inference.engine = "vllm"
    vLLM servers do not tell the experts: leave it out
inference.deterministic & inference.engine = "vllm"
    equal seeds give other tokens there: leave it out
inference.sleep & training.max_staleness
    servers sample while the learner works: leave sleep out, or set max_staleness = 0
inference.sleep & weight_transfer.backend = "nccl"
    it sends to servers on GPUs of their own, which need not sleep; known there: folder
inference.sleep & cluster.launcher = "ray" & no inference.urls
    servers that Ray starts have GPUs of their own, and need not sleep
inference.engine = "vllm" & no inference.urls & no inference.vllm_python
    it needs urls of servers, or a vllm_python to start them with (docs/vllm.md)
rollout.max_tokens >= inference.max_model_len
    it must be below, since prompt and response share it
rollout.max_tokens >= multi_turn.max_model_length & multi_turn.enable = true
    it must be below, since prompt and response share it
model & no model.preset & no model.path & no model.name
    one of them must be given
model.path | model.name & model.preset
    exactly one of model.preset, model.path and model.name must be given
model.name & model.path
    exactly one of model.preset, model.path and model.name must be given
model.revision & no model.name
    it is of a model of the hub
model.only_tool_words = true & no model.preset
    only a preset's tokenizer has a token for each word
model.only_tool_words = true & <optional calls>
    words are a call only after its opening in the prompt: set rollout.policy_config.tool_choice to "required"
model.only_tool_words = true & inference.engine = "vllm"
    it samples from the whole vocabulary, and training would have another distribution
model.only_tool_words = true & rollout_only
    it samples other tokens too, which the actor cannot
model.tool_call_format | model.chat_template_kwargs & model.preset
    a preset has its own chat template and format: leave it out
training.max_staleness & inference.deterministic
    which version samples a token would depend on how long other work takes; drop one of them
rollout.temperature < 0.01 | rollout.temperature > 2 | evaluation.temperature > 2 & inference.engine = "vllm"
    it allows temperatures from 0.01 to 2, and 0
evaluation.temperature < 0.01 & no evaluation.temperature = 0 & inference.engine = "vllm"
    it allows temperatures from 0.01 to 2, and 0
<truncated sampling> & inference.engine = "vllm"
    it returns log-probs of the truncated distribution, and training computes those of the whole one
<truncated sampling> & no rollout.allow_truncated_sampling = true
    it cuts away probability that training would still count; set it to true to accept that
services.gateways | inference.own_process & no cluster
    without it a run is one process with one gateway. Did you mean [cluster] with launcher = "local"?
weight_transfer.backend = "memory" & cluster
    learner and engine have a process each; known there: folder, and nccl to vLLM servers
weight_transfer.backend = "memory" & inference.engine = "vllm"
    it samples in other processes; known there: folder, nccl
weight_transfer.backend = "nccl" & no inference.engine = "vllm"
    it sends weights to vLLM servers; known here: folder. Did you mean inference.engine = 'vllm'?
weight_transfer.backend = "nccl" & lora
    adapters alone change, which go by folder in a fraction of the bytes; known there: folder
weight_transfer.backend = "nccl" & cluster.launcher = "ray" & no inference.urls
    servers that Ray starts are known by ports of this machine: give inference.urls, or use folder
cluster.launcher = "external" & no learner.url
    it needs the address of a learner that the run does not start, "http://node3:9000" (docs/cluster.md)
cluster.launcher = "external" & inference.engine = "vllm" & no inference.urls
    it starts no vLLM server: give inference.urls in place of vllm_python
cluster.launcher = "local" & learner.nnodes
    it starts nothing on another machine. Did you mean launcher = 'ray'?
training.optimizer_offload & <several ranks>
    it is of one process. Did you mean learner.fsdp_cpu_offload = true?
model.device = "mps" & <several ranks>
    an Apple GPU serves one process alone
training.critic = "own" & lora
    it trains whole layers, and the policy's own are held; known there: head
training.critic = "own" & rollout_only
    it learns from the actor's samples alone; known there: head
rollout.seeds | evaluation.seeds & data
    rows are played in place of worlds: leave one of them out
data & no data.held_out_share & no data.evaluation_split & no data.evaluation_path
    one of them says which rows are held out
data.evaluation_split | data.evaluation_path & data.held_out_share
    held-out rows are a share of data.split or come from elsewhere, and not both
data.evaluation_split == data.split & no data.evaluation_path
    it is trained on; did you mean data.held_out_share?
data.interaction & no multi_turn.enable = true
    interactions answer in conversations
training.refill_rounds & no training.skip_flat_groups = true
    it replaces the groups that are skipped
training.skip_certain_above & training.critic = "head" & algorithm.advantage: needs_values
    it omits segments from the passes that the head learns in. Did you mean training.critic = 'own'?
training.skip_certain_above & training.aggregation: over = "iteration"
    it omits segments, and what is left of an episode has the weight of all of it; known: token_mean
algorithm.ratio_level = "episode" | training.behaviour_weight_level = "episode" & training.skip_certain_above
    segments are omitted of a product over all tokens of an episode; known there: token, decision
curriculum & <agent>
    an agent has no snapshots, from which groups would start
curriculum & multi_turn.enable = true
    a conversation has no snapshots, from which groups would start
curriculum & algorithm.advantage: needs_branches
    branches of games that began at a snapshot are not measured; use another estimator
rollout.reward_function & curriculum
    it judges whole episodes, and those of the curriculum begin in the middle of one
rollout.reward_function & algorithm.advantage: needs_branches
    it judges whole episodes, and a branch begins in the middle of one
rollout.reward_function & algorithm.train_branches
    it judges whole episodes, and a continuation begins in the middle of one
algorithm.train_branches & <agent>
    no snapshot holds an agent, so nothing can play on from its decisions (docs/captures.md)
algorithm.fork_rule: reads_samples & algorithm.advantage: needs_branches
    the measured decision would be chosen by its own sample, which biases it; known there: uniform
algorithm.fork_rule: reads_samples & algorithm.branch_rollouts = 1
    its continuations are compared with each other alone, and one has no other; give branch_rollouts 2 or more
algorithm.fork_rule: needs_values & no algorithm.advantage: needs_values
    it reads a critic's values, which this estimator has not. Did you mean advantage = 'gae'?
rollout_only.model_path & rollout_only.inference_url
    which of them is it?
rollout_only.inference_url & no rollout_only.model
    it needs the model's name there
<its truncated sampling> & no rollout.allow_truncated_sampling = true
    its log-probs are on a part of the vocabulary, and the actor's on all of it; set it to true to accept that
rollout_only.inference_url & <another distribution> & no rollout_only.logprobs = "processed"
    raw log-probs are not of what was sampled from: leave it out, or have the server return those that it
    samples with and set logprobs = "processed"
rollout_only.inference_url & model.preset & <all at servers>
    a preset has no tokenizer to share with a server; name the actor's model with model.path or model.name
rollout_only.objective = "single_ratio" & no algorithm.loss: clips
    the loss has no ratio to weigh its samples by, which would count as the actor's own; use objective =
    'decoupled' or 'reinforce', or a loss that clips, as 'clipped' does
algorithm.advantage: needs_branches & rollout_only
    it measures what the actor would earn from a decision on, and others play too; use another estimator
training.kl_reward_coef & rollout_only
    the actor pays for the KL of its own samples, and those are not drawn from it; kl_coef goes with both
rollout_allocation_schedule & no rollout_only
    it has only the actor to choose; a [rollout_only] is active when model_path, or inference_url, is set
rollout_only & no rollout_allocation_schedule
    nothing says how often it samples; write [rollout_allocation_schedule] with type = "constant" and
    alpha = 0.5, for one half
rollout_allocation_schedule.selection = "reward" |
rollout_allocation_schedule.type: looks_back & training.max_staleness
    it looks back on iterations, and later ones are planned before they are over; set max_staleness = 0
"""
_ADVICE = """
training.step_rewards_beta & training.step_rewards_horizon = "realised"
    it looks into the future; step_rewards_horizon = "max_decisions" makes it causal
no training.step_rewards_mode = "off" & training.step_rewards_enabled = false
    only the outcome is rewarded
rollout.reward_function & no training.step_rewards_mode = "off" & training.step_rewards_enabled = true &
no algorithm.episode_score = "outcome"
    its base_reward is added to each decision, and its score is told but trains nothing; with an estimator
    that has episode scores, algorithm.episode_score = 'outcome' trains on both
training.group_size = 1 & no algorithm.advantage: needs_values & no algorithm.advantage: needs_branches &
no algorithm.train_branches
    group-relative advantages are all 0, nothing will be learned
rollout.max_turns = 1 & algorithm.advantage: needs_branches & no training.group_size = 1
    it asks for no branches from a first decision, whose branches are its siblings, so every decision is
    compared as in 'stepwise'
algorithm.train_branches & algorithm.advantage: divides_by_std & algorithm.fnorm = "std"
    first decisions after forks have advantages in rewards, all others in standard deviations; use an
    estimator that does not divide
training.kl_reward_coef & algorithm.advantage: divides_by_std & algorithm.fnorm = "std"
    it divides by a standard deviation: where siblings earned the same, the KL alone is blown up to advantages
    of size 1, whatever the coefficient; use an estimator that does not divide
training.kl_coef & training.kl_reward_coef
    both pull to the same model, in the loss and in r_t; one of them is enough
no training.kl_reward_kind = "k1" & training.kl_reward_coef
    it hardly holds a policy that is near the reference: as a reward only "k1" has the gradient of the KL
training.refill_rounds
    it replaces worlds without spread (always or never solved) by others: what is learned from is chosen by
    its outcome, a named bias (docs/credit.md)
training.skip_certain_above & no algorithm.advantage: needs_values
    it has no critic, and what is omitted is small only where the advantages of a state are 0 on average
    (docs/credit.md). Did you mean advantage = 'gae' with training.critic = 'own'?
training.entropy_coef > 0 | training.kl_coef & training.skip_certain_above
    certain decisions are omitted from it too, and it no longer holds the policy back where it is most certain
training.skip_certain_above & rollout_only
    it omits segments of the actor alone, so that those of fixed policies weigh more
algorithm.advantage: needs_state_keys & algorithm.state_hashing_function = "text_history"
    it compares decisions in equal states, and these hold all that was seen before: hardly any is met twice
    (anchors/singleton_frac is the share that is not)
algorithm.episode_score = "outcome" & no algorithm.advantage: needs_state_keys &
no algorithm.advantage: needs_texts
    it reads scores alone: what decisions earn (step rewards, penalties, KL) trains nothing
training.learning_rate_final & training.learning_rate_schedule = ["constant", "desired_kl"]
    it is never reached: the rate does not fall
inference.sleep & model.device = "cpu"
    vLLM on a CPU keeps its memory while it sleeps
no rollout_only.model_path & no rollout_only.inference_url
    it is not active and samples nothing
<alpha 1>
    no policy of [rollout_only] ever samples
<alpha 0>
    the actor never samples, so evaluations alone tell how it plays
rollout_only.baseline = "per_policy" & rollout_allocation_schedule.unit = ["iteration", "group"]
    it makes no difference where siblings share their policy; unit = "rollout" mixes them
"""
# Settings that bias the expected gradient of an iteration's first optimizer step. The clip of later steps is
# not listed, because it is no bias of the credit.
# Source: DESIGN.md 4.6; enumerated in tests/trainer_backend/core/test_unbiased.py.
_BIASES = """
<lambda> | <token lambda> | algorithm.bootstrap_truncated
    trusts the critic
training.aggregation: is_biased
    sampled denominators
algorithm.gamma < 1
    discount
training.refill_rounds
    worlds chosen by their outcome
training.skip_certain_above
    of certain decisions, only what was sampled against the odds
<truncated sampling>
    probability that is never sampled
training.max_staleness
    truncated weights of older samples
curriculum
    games that start where earlier ones have come
algorithm.train_branches
    also trained from the states of forks; docs/credit.md
rollout_only
    truncated weights; docs/mixture.md
"""
_OWN_TASK_APPS = {
    **{
        f"services.{key}": f"start those with TURNWISE_{key.upper()} in their environment"
        for key in TASK_APP_SETTINGS
    },
    "services.task_plugins": "start those with `turnwise task-app --plugins FILE`",
    "services.task_apps": "name as many there",
    "multi_turn.interaction_config_path": "start those with `turnwise task-app --interactions FILE`",
}


def _shared_worlds(config: JobConfig) -> list[int]:
    """Return the seeds in rollout.seeds that the evaluation uses too."""
    if not config.rollout.seeds:
        return []
    held_out = set(config.evaluation.seeds) or evaluation_worlds(config.evaluation.instances)
    return sorted(seed for seed in config.rollout.seeds if seed in held_out)


def unknown_state_keys(names: Iterable[str], known: Sequence[str], env_name: str) -> Iterator[str]:
    """Yield a sentence for each name that is not among the environment's state keys (`known`)."""
    for name in dict.fromkeys(names):
        if not is_state_key(name, known):
            yield f"{env_name!r} has no state key {name!r}{did_you_mean(name, known)}"


def _unknown_to_ours(config: JobConfig, key: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each name in the job's key `key` that is no state key of its environment.

    Only built-in environments are checked, because the state keys of others are not known here.
    """
    env_name = config.rollout.env_name
    known = list_state_keys(env_name)
    if known is not None:
        yield from (f"{key}: {line}" for line in unknown_state_keys(names, known, env_name))


def _missing(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each key that the type of the schedule requires and that the job does not set."""
    table = config.rollout_allocation_schedule
    if table is not None:
        needs = allocation(table.type).needs
        for key in sorted((needs & type(table).model_fields.keys()) - table.values(needs).keys()):
            yield f"{_SCHEDULE}.{key} is required with type = {table.type!r}"


def _wrong_bounds(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each contradiction between alpha_0, min_alpha and max_alpha.

    The type adaptive is also refused if alpha_0 is 0 or 1, because then one side would not sample at first.
    """
    table = config.rollout_allocation_schedule
    if table is None:
        return
    first, low, high = table.alpha_0, table.min_alpha, table.max_alpha
    is_adaptive = table.type == "adaptive"
    if is_adaptive:
        low, high = (MIN_ALPHA if low is None else low), (MAX_ALPHA if high is None else high)
    if low is not None and high is not None and low > high:
        yield f"{_SCHEDULE}.min_alpha ({low:g}) is above max_alpha ({high:g})"
    elif first is not None and high is not None and first > high:
        yield f"{_SCHEDULE}.alpha_0 ({first:g}) is above max_alpha ({high:g})"
    if is_adaptive and first is not None and low is not None and 0.0 < first < low:
        yield f"{_SCHEDULE}.alpha_0 ({first:g}) is below min_alpha ({low:g})"
    if is_adaptive and first in (0.0, 1.0):
        yield f"{_SCHEDULE}.alpha_0 is {first:g}; adaptive must begin with both policies: above 0 and below 1"


def _wrong_answers(config: JobConfig) -> Iterator[str]:
    """Yield a sentence if a schedule fails, or if its alpha for a step changes when it is asked again."""
    place = f"{_SCHEDULE}.type is {Case(config).value(f'{_SCHEDULE}.type')!r}"
    try:
        first, again = (_alphas(config, backwards=back) for back in (False, True))
    except JobError as error:
        yield f"{place}: {error}"
        return
    if step := next((step for step, alpha in first.items() if again[step] != alpha), None):
        yield (
            f"{place}, which answers otherwise when it is asked again: in step {step} alpha was "
            f"{first[step]:g} and {again[step]:g}. A schedule goes by the step and its arguments alone, so "
            "that a resumed run makes the same choices; an argument `seed` is the job's"
        )


def _unlike_papers(config: JobConfig) -> Iterator[str]:
    """Yield a sentence if values of the job differ from those in the paper of its estimator or its loss."""
    algorithm, case = config.algorithm, Case(config)
    papers = {
        _ADVANTAGE: estimator(algorithm.advantage).values,
        "algorithm.loss": policy_loss(algorithm.loss).values,
    }
    for board, values in papers.items():
        actual = {key: case.value(key) for key in values}
        other = [
            f"{key} = {actual[key]!r} (there {there!r})"
            for key, there in values.items()
            if actual[key] != there
        ]
        if other:
            place = f"{board} = {case.value(board)!r}"
            yield f"{place} with other values than its paper's: {', '.join(other)}"


def to_find(facts: object) -> bool:
    """Return False; the `holds` of a rule whose `sentence` finds out whether the job breaks the rule."""
    return False


_OTHERS: tuple[Rule[JobConfig], ...] = (
    Rule(
        ("rollout.episodes_per_batch", "training.group_size"),
        lambda c: not c.rollout.episodes_per_batch % c.training.group_size,
        "rollout.episodes_per_batch ({rollout.episodes_per_batch}) must be a multiple of training.group_size "
        "({training.group_size})",
    ),
    Rule(
        ("services.gateways", "inference.urls", "inference.replicas"),
        lambda c: (
            c.inference.engine != "vllm"
            or c.services.gateways <= (len(c.inference.urls) or c.inference.replicas)
        ),
        "services.gateways is {services.gateways}, and there are fewer vLLM servers (inference.urls, or "
        "replicas): each gateway has servers of its own",
    ),
    Rule(
        ("services.gateways", "services.gateway_port"),
        lambda c: not c.services.gateway_port or c.services.gateway_port + c.services.gateways <= 65536,
        "services.gateways is {services.gateways}, and from services.gateway_port = {services.gateway_port} "
        "on there are not so many ports",
    ),
    Rule(
        ("learner.data_parallel_replicate_degree", "learner.nproc_per_node", "learner.nnodes"),
        lambda c: c.learner.ranks == 1 or not c.learner.ranks % c.learner.data_parallel_replicate_degree,
        "learner.data_parallel_replicate_degree is {learner.data_parallel_replicate_degree}, and it must "
        "divide the {learner.ranks} ranks of the learner (nproc_per_node times nnodes)",
    ),
    Rule(
        ("rollout.seeds", "evaluation.seeds", "evaluation.instances"),
        lambda c: not _shared_worlds(c),
        lambda c: (
            f"rollout.seeds and the worlds of the evaluation share {_shared_worlds(c)[0]}: what was trained "
            "on is not held out; take it from one of the two"
        ),
    ),
    Rule(
        ("rollout.env_config", "data"),
        lambda c: c.data is None,
        lambda c: (
            f"rollout.env_config.{key} is that of each row of [data]; leave it out"
            for key in SET_BY_ROWS
            if key in c.rollout.env_config
        ),
    ),
    Rule(
        ("rollout_only.name",),
        lambda c: len({policy.name for policy in c.rollout_only}) == len(c.rollout_only),
        lambda c: f"rollout_only.name: {[policy.name for policy in c.rollout_only]}; each needs its own",
    ),
    Rule(
        ("rollout.state_keys", "rollout.env_name"),
        to_find,
        lambda c: _unknown_to_ours(c, "rollout.state_keys", c.rollout.state_keys),
    ),
    Rule(
        (_STATE_KEY, "rollout.env_name"),
        to_find,
        lambda c: _unknown_to_ours(c, _STATE_KEY, [c.algorithm.state_hashing_function]),
    ),
    Rule((f"{_SCHEDULE}.type",), to_find, _missing, needs="plugs"),
    Rule((f"{_SCHEDULE}.alpha_0", f"{_SCHEDULE}.type"), to_find, _wrong_bounds),
    Rule((f"{_SCHEDULE}.type",), to_find, _wrong_answers, needs="plugs"),
    Rule((_ADVANTAGE, "algorithm.loss"), to_find, _unlike_papers, "advice", "plugs"),
    Rule(
        (_ADVANTAGE,),
        lambda c: not estimator(c.algorithm.advantage).bias,
        lambda c: f"{_ADVANTAGE} = {c.algorithm.advantage!r} ({estimator(c.algorithm.advantage).bias})",
        "bias",
        "plugs",
    ),
)


@cache
def all_rules() -> tuple[Rule[JobConfig], ...]:
    """Return every rule that needs no task app. The tables are parsed at the first call."""
    return (
        *_OTHERS,
        *(
            never(
                has(key),
                has("services.task_url"),
                why="it is for the task app that the job starts itself, and task_url names others: "
                + instead,
            )
            for key, instead in _OWN_TASK_APPS.items()
        ),
        *read_table(_REFUSALS, CONDITIONS),
        *read_readers(_READERS, CONDITIONS),
        *read_table(_NOT_READ, CONDITIONS, "not read"),
        *read_table(_ADVICE, CONDITIONS, "advice"),
        *read_table(_BIASES, CONDITIONS, "bias"),
    )


def not_read_rules(config: JobConfig) -> Iterator[Rule[JobConfig]]:
    """Yield a rule for each key that the job's estimator, loss ... does not read, but another one reads.

    The second key of each rule is the key that chooses the estimator, loss ..., such as algorithm.advantage.
    """
    for board in READ_BY:
        name = Case(config).value(board)
        for key, readers in not_read(board, name).items() if name is not None else ():
            if key in _OF_FORKS and config.algorithm.train_branches:
                continue
            if key not in _ALWAYS_ALLOWED and is_key(key):  # keys of [TABLE.NAME] are checked elsewhere
                choice = f"{board} = {name!r}"
                told = f"is not read by {choice}"
                if board == _ADVANTAGE and key.startswith(("training.value_", "training.critic")):
                    told = f"needs a critic, which {choice} has not"
                rule = never(has(key), has(board, name), why="", kind="not read")
                yield replace(rule, sentence=f"{key} {told}; known to: {', '.join(readers)}")


def check_rules(config: JobConfig, *kinds: Kind, knows_plugs: bool = True) -> Iterator[Finding]:
    """Yield the findings of each rule of these kinds that the job breaks.

    Args:
        knows_plugs: False if the job names an estimator, a loss or another plug-in that this process has not
            loaded. Then only the rules that need nothing but the TOML are checked.
    """
    for rule in (*all_rules(), *not_read_rules(config)) if knows_plugs else all_rules():
        if rule.kind in kinds and (knows_plugs or rule.needs == "toml"):
            yield from rule.findings(config)


def biases(config: JobConfig) -> list[str]:
    """Return a text for each setting that biases the expected gradient of the first optimizer step."""
    return [finding.sentence for finding in check_rules(config, "bias")]
