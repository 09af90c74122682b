"""What is set must have an effect: keys that nothing reads, and state keys that nobody makes. Pure."""

from collections.abc import Iterator

from shared_schemas.base import did_you_mean
from shared_schemas.state_keys import state_keys_of
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.training_table import AlgorithmTable, TrainingTable
from trainer_backend.plugins import ESTIMATORS, aggregation, estimator, policy_loss

_OF_CRITICS = ("value_coef", "value_clip", "value_learning_rate", "value_trunk_gradient")
_OF_ESTIMATORS = sorted(frozenset().union(*(plug.takes for plug in ESTIMATORS.values())))


def unknown_state_keys(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Key and sentence for each state key that the environment has not. What a plug-in's has, only its task
    app knows, which is asked when the run starts."""
    env_name = config.rollout.env_name
    known = state_keys_of(env_name)
    named = [("rollout.state_keys", name) for name in config.rollout.state_keys]
    named.append(("algorithm.state_hashing_function", config.algorithm.state_hashing_function))
    for key, name in named:
        if known is not None and name not in known:
            yield key, f"{key}: {env_name!r} has no state key {name!r}{did_you_mean(name, known)}"


def unread_keys(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Key and sentence for each key that is set to other than its default and that nothing reads.

    gamma belongs to the task, and a clip range stands in every job: so jobs that differ in one name alone
    can be compared.
    """
    algorithm, training = config.algorithm, config.training
    plug = estimator(algorithm.advantage)
    takes = plug.takes
    for key in () if plug.needs_values else _OF_CRITICS:
        if getattr(training, key) != TrainingTable.model_fields[key].default:
            readers = ", ".join(name for name, other in ESTIMATORS.items() if other.needs_values)
            told = f"needs a critic, which algorithm.advantage = {algorithm.advantage!r} has not; known"
            yield f"training.{key}", f"training.{key} {told} to: {readers}"
    for key in _OF_ESTIMATORS:
        if key not in takes and getattr(algorithm, key) != AlgorithmTable.model_fields[key].default:
            readers = ", ".join(name for name, plug in ESTIMATORS.items() if key in plug.takes)
            told = f"is not read by algorithm.advantage = {algorithm.advantage!r}; known to: {readers}"
            yield f"algorithm.{key}", f"algorithm.{key} {told}"
    if config.rollout.reward_function is not None and plug.needs_branches:
        yield (
            "rollout.reward_function",
            "rollout.reward_function judges whole episodes, and algorithm.advantage = "
            f"{algorithm.advantage!r} compares what is played on from the middle of one",
        )
    if training.clip_dual is not None and "clip_dual" not in policy_loss(algorithm.loss).takes:
        yield (
            "training.clip_dual",
            f"training.clip_dual is not read by algorithm.loss = {algorithm.loss!r}",
        )
    if training.constant_tokens is not None and aggregation(training.aggregation).over != "plan":
        yield (
            "training.constant_tokens",
            f"training.constant_tokens is not read by training.aggregation = {training.aggregation!r}; known "
            "to: constant",
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
    mode = training.step_rewards_mode if training.step_rewards_enabled else "off"
    if algorithm.default_step_reward and mode != "off":
        yield (
            "algorithm.default_step_reward",
            "algorithm.default_step_reward is for decisions without rewards of their own; "
            f"training.step_rewards_mode is {mode!r}",
        )
