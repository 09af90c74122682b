"""What a valid job may still have got wrong. Pure."""

from trainer_backend.core.selection import Weighted
from trainer_backend.jobfile.mixture_table import AllocationTable
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.training_table import TrainingTable
from trainer_backend.plugins import aggregation, allocation, estimator, not_read, policy_loss


def advice(config: JobConfig) -> list[str]:
    """A sentence for everything that a person should be told of before it costs an hour."""
    training = config.training
    found = []
    if training.step_rewards_beta > 0 and training.step_rewards_horizon == "realised":
        found.append(
            "training.step_rewards_beta with the realised length looks into the future; "
            'step_rewards_horizon = "max_decisions" makes it causal'
        )
    if not training.step_rewards_enabled and training.step_rewards_mode != "off":
        found.append(
            f"training.step_rewards_mode is {training.step_rewards_mode!r}, but step_rewards_enabled is "
            "false: only the outcome is rewarded"
        )
    mode = training.step_rewards_mode if training.step_rewards_enabled else "off"
    by_outcome = config.algorithm.episode_score == "outcome"
    if config.rollout.reward_function is not None and mode != "off" and not by_outcome:
        found.append(
            f"rollout.reward_function with training.step_rewards_mode = {mode!r}: its base_reward is added "
            "to each decision, and its score is told but trains nothing; with an estimator that has episode "
            "scores, algorithm.episode_score = 'outcome' trains on both"
        )
    plug, name = estimator(config.algorithm.advantage), config.algorithm.advantage
    if training.group_size == 1 and not plug.needs_values and not plug.needs_branches:
        found.append("training.group_size is 1: group-relative advantages are all 0, nothing will be learned")
    if plug.needs_branches and config.rollout.max_turns == 1 and training.group_size > 1:
        found.append(
            f"rollout.max_turns is 1: algorithm.advantage = {name!r} asks for no branches from a first "
            "decision, whose branches are its siblings, so every decision is compared as in 'stepwise'"
        )
    found += _of_the_kl(config)
    if training.refill_rounds:
        found.append(
            "training.refill_rounds replaces worlds without spread (always or never solved) by others: what "
            "is learned from is chosen by its outcome, a named bias (docs/credit.md)"
        )
    if by_outcome and not plug.needs_state_keys:
        found.append(
            f"algorithm.episode_score = 'outcome' with algorithm.advantage = {name!r}, which reads scores "
            "alone: what decisions earn beside the outcome (step rewards, penalties, KL) trains nothing"
        )
    found += _unlike_the_paper(config)
    found += _of_a_mixture(config)
    usual, fall = TrainingTable.model_fields["learning_rate_final"].default, training.learning_rate_schedule
    unread = not_read("training.learning_rate_schedule", fall)
    if "training.learning_rate_final" in unread and training.learning_rate_final != usual:
        found.append(
            f"training.learning_rate_final = {training.learning_rate_final} is never reached: with "
            f'learning_rate_schedule = "{fall}" the rate does not fall'
        )
    return found


def _of_the_kl(config: JobConfig) -> list[str]:
    training, name = config.training, config.algorithm.advantage
    plug = estimator(name)
    found = []
    if training.kl_reward_coef and plug.divides_by_std and config.algorithm.fnorm == "std":
        found.append(
            f"training.kl_reward_coef with algorithm.advantage = {name!r}, which divides by a standard "
            "deviation: where siblings earned the same, the KL alone is blown up to advantages of size 1, "
            "whatever the coefficient; use an estimator that does not divide"
        )
    if training.kl_coef and training.kl_reward_coef:
        found.append(
            "training.kl_coef and training.kl_reward_coef pull to the same model twice, in the loss and in "
            "r_t; one of them is enough"
        )
    if training.kl_reward_coef and training.kl_reward_kind != "k1":
        found.append(
            f"training.kl_reward_kind = {training.kl_reward_kind!r} hardly holds a policy that is near the "
            'reference: as a reward only "k1" has the gradient of the KL'
        )
    return found


def _unlike_the_paper(config: JobConfig) -> list[str]:
    """A loss that bears a paper's name, with values of another: often they stood in the job before it."""
    name, given = config.algorithm.loss, config.model_dump(include={"algorithm", "training"})
    values = policy_loss(name).values.items()
    found = [(key, value, given[key.partition(".")[0]][key.partition(".")[2]]) for key, value in values]
    other = [f"{key} = {own!r} (there {value!r})" for key, value, own in found if own != value]
    return (
        [f"algorithm.loss = {name!r} with other values than its paper's: {', '.join(other)}"] if other else []
    )


def biases(config: JobConfig) -> list[str]:
    """What turns the expected gradient of the job's first optimizer step away from the policy gradient, each
    by the key that brings it; empty where nothing does.

    Later steps of an iteration are clipped around the policy that sampled, which is no bias of the credit.

    Source: DESIGN.md 4.6; enumerated in tests/trainer_backend/core/test_unbiased.py.
    """
    algorithm, training = config.algorithm, config.training
    plug = estimator(algorithm.advantage)
    found = [f"algorithm.advantage = {algorithm.advantage!r} ({plug.bias})"] if plug.bias else []
    for key in ("gae_lambda", "gae_token_lambda"):
        if key in plug.takes and getattr(algorithm, key) < 1.0:
            found.append(f"algorithm.{key} = {getattr(algorithm, key):g} (trusts the critic)")
    if algorithm.bootstrap_truncated:
        found.append("algorithm.bootstrap_truncated = true (trusts the critic)")
    if aggregation(training.aggregation).is_biased:
        found.append(f"training.aggregation = {training.aggregation!r} (sampled denominators)")
    if algorithm.gamma < 1.0:
        found.append(f"algorithm.gamma = {algorithm.gamma:g} (discount)")
    if training.refill_rounds:
        found.append(f"training.refill_rounds = {training.refill_rounds} (worlds chosen by their outcome)")
    if config.sampling_of(None).is_truncated:
        found.append("rollout.allow_truncated_sampling = true (probability that is never sampled)")
    if config.fixed_policies:
        found.append("[rollout_only] (truncated weights; docs/mixture.md)")
    return found


def _of_a_mixture(config: JobConfig) -> list[str]:
    table, active = config.rollout_allocation_schedule, config.fixed_policies
    found = [
        f"[rollout_only] {item.name!r} is not active and samples nothing: neither model_path nor "
        "inference_url is set"
        for item in config.rollout_only
        if not item.is_active
    ]
    if table is None or not active:
        return found
    told = "rollout_allocation_schedule: alpha, the actor's share, is"
    alphas = _alphas(table, config.training.iterations)
    if alphas == {1.0}:
        found.append(f"{told} 1 in every iteration: no policy of [rollout_only] ever samples")
    if alphas == {0.0}:
        found.append(
            f"{told} 0 in every iteration: the actor never samples, so evaluations alone tell how it plays"
        )
    alone = [item.name for item in active if item.baseline == "per_policy"]
    if alone and table.unit != "rollout":
        found.append(
            f"[rollout_only] {alone[0]!r}: baseline = 'per_policy' makes no difference where siblings share "
            f'their policy; rollout_allocation_schedule.unit is {table.unit!r}, and "rollout" mixes them'
        )
    return found


def _alphas(table: AllocationTable, iterations: int) -> set[float]:
    """Shares of the actor among which are the lowest and the highest; none where earlier iterations decide.

    Between two of the steps at which policies change places alpha only rises, or stays.
    """
    plug = allocation(table.type)
    if plug.looks_back or not iterations:
        return set()
    schedule = plug.schedule(table.given(plug.needs | plug.takes), seed=0, selection=Weighted())
    switched = {step for step in table.switch_steps if step <= iterations}
    return {schedule.alpha_at(step) for step in {1, iterations} | switched}
