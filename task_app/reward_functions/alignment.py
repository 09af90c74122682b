"""Pure: what a reward function says of steps -> the base_reward of each decision, and what did not fit."""

from collections.abc import Sequence

from shared_schemas.evaluate_result import EvaluateResult, StepOutput
from shared_schemas.rewards import RewardPart
from shared_schemas.trajectory import StepData

_NAMED = 5


def align_data_for_rl_processing(
    current_eval_result: EvaluateResult, current_step_data_list: Sequence[StepData], rollout_id: str
) -> tuple[list[StepData], list[str]]:
    """Put the base_reward of every step_output on the step that its step_index names.

        step_index = t = turn - 1 = StepData.assistant_turn_index ("2" is 2)

    Of two outputs for one step the last one counts; a step without one keeps base_reward None. A base_reward
    is a reward part of its decision too, of source "user" (core.rewards adds it where the mode does).

    Args:
        current_eval_result: of this episode; without step_outputs nothing changes.
        current_step_data_list: [T] its decisions, in order.
        rollout_id: named in the warnings.

    Returns:
        [T] the steps, and a sentence for each kind of misfit: named twice, not there, left out.

    Source: the aligner of the library that source 2 belongs to, whose name this is; there unmatched and
    duplicate indices are silent, and the steps alone are returned. DESIGN.md 4.3.
    """
    outputs = current_eval_result.step_outputs
    if outputs is None:
        return list(current_step_data_list), []
    found, twice, odd = _by_step(outputs, len(current_step_data_list))
    steps = [
        _with_base_reward(step, found[t]) if t in found else step
        for t, step in enumerate(current_step_data_list)
    ]
    left_out = [t for t in range(len(steps)) if t not in found]
    there = f"this episode has 0..{len(steps) - 1}"
    told = (
        (twice, "step_outputs name a step more than once, and the last one counts"),
        (odd, f"step_outputs name steps that are not there ({there}), and are not used"),
        (left_out, "steps have no step_output, and no base_reward"),
    )
    return steps, [f"{rollout_id}: {sentence}: {_listed(which)}" for which, sentence in told if which]


def _by_step(
    outputs: Sequence[StepOutput], count: int
) -> tuple[dict[int, float], list[int], list[int | str]]:
    """base_reward by t; the t that came again; the indices that are no t."""
    found: dict[int, float] = {}
    twice: list[int] = []
    odd: list[int | str] = []
    for output in outputs:
        t = _decision_of(output.step_index)
        if t is None or not 0 <= t < count:
            odd.append(output.step_index)
            continue
        if t in found and t not in twice:
            twice.append(t)
        found[t] = output.base_reward
    return found, twice, odd


def _decision_of(step_index: int | str) -> int | None:
    if isinstance(step_index, int):
        return step_index
    return int(step_index) if step_index.isascii() and step_index.isdigit() else None


def _with_base_reward(step: StepData, base_reward: float) -> StepData:
    part = RewardPart(source="user", value=base_reward)
    return step.model_copy(update={"base_reward": base_reward, "reward_parts": (*step.reward_parts, part)})


def _listed(which: Sequence[int | str]) -> str:
    shown = ", ".join(repr(one)[:40] for one in which[:_NAMED])
    return f"{shown} and {len(which) - _NAMED} more" if len(which) > _NAMED else shown
