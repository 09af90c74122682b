"""What is set must have an effect: keys that nothing reads, and state keys that nobody makes. Pure."""

from collections.abc import Iterator

from shared_schemas.base import did_you_mean
from shared_schemas.state_keys import state_keys_of
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.training_table import TrainingTable
from trainer_backend.plugins import READS, estimator, not_read

# Told of (jobfile.advice), or in every job, so that jobs that differ in one name alone can be compared.
_NEVER_REFUSED = frozenset({"training.clip_low", "training.clip_high", "training.learning_rate_final"})


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
    """Key and sentence for each key that is set to other than its default and that nothing reads."""
    algorithm, training = config.algorithm, config.training
    yield from _not_read_with(config)
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
    mode = training.step_rewards_mode if training.step_rewards_enabled else "off"
    if algorithm.default_step_reward and mode != "off":
        yield (
            "algorithm.default_step_reward",
            "algorithm.default_step_reward is for decisions without rewards of their own; "
            f"training.step_rewards_mode is {mode!r}",
        )


def _not_read_with(config: JobConfig) -> Iterator[tuple[str, str]]:
    """The keys of `plugins.READS` that the job's names do not read."""
    for board in READS:
        table, _, key_of_name = board.partition(".")
        if getattr(config, table) is None:
            continue
        name = getattr(getattr(config, table), key_of_name)
        for key, readers in not_read(board, name).items():
            if key in _NEVER_REFUSED or not _is_set(config, key):
                continue
            chosen = f"{key_of_name if table not in ('algorithm', 'training') else board} = {name!r}"
            told = f"is not read by {chosen}"
            if key.startswith("training.value_"):
                told = f"needs a critic, which {chosen} has not"
            yield key, f"{key} {told}; known to: {', '.join(readers)}"


def _is_set(config: JobConfig, dotted: str) -> bool:
    """Whether the key has another value than its default."""
    table, _, key = dotted.partition(".")
    home = getattr(config, table)
    return bool(getattr(home, key) != type(home).model_fields[key].get_default())
