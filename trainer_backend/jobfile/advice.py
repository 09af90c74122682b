"""What a valid job may still have got wrong. Pure."""

from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.training_table import TrainingTable
from trainer_backend.plugins import estimator


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
    if training.group_size == 1 and not estimator(config.algorithm.advantage).needs_values:
        found.append("training.group_size is 1: group-relative advantages are all 0, nothing will be learned")
    if training.refill_rounds:
        found.append(
            "training.refill_rounds replaces worlds without spread (always or never solved) by others: what "
            "is learned from is chosen by its outcome, a named bias (docs/route.md, stop 10)"
        )
    usual = TrainingTable.model_fields["learning_rate_final"].default
    if training.learning_rate_schedule == "constant" and training.learning_rate_final != usual:
        found.append(
            f"training.learning_rate_final = {training.learning_rate_final} is never reached: with "
            'learning_rate_schedule = "constant" the rate does not fall'
        )
    return found
