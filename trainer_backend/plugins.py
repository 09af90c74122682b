"""The plug boards of the trainer: every name that a job may choose, and its implementation.

Importing this file imports no torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from shared_schemas.base import did_you_mean
from trainer_backend.core.adaptive import AdaptiveSchedule
from trainer_backend.core.advantages.branch import branch
from trainer_backend.core.advantages.derivation import Derivation
from trainer_backend.core.advantages.episodes import EstimatorPlug
from trainer_backend.core.advantages.g2po import g2po
from trainer_backend.core.advantages.gae import gae, gae_token
from trainer_backend.core.advantages.gagpo import gagpo
from trainer_backend.core.advantages.gigpo import gigpo, gigpo_additive
from trainer_backend.core.advantages.gigpo_soft import gigpo_soft
from trainer_backend.core.advantages.graphgpo import graphgpo
from trainer_backend.core.advantages.grpo import grpo, grpo_no_std
from trainer_backend.core.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from trainer_backend.core.advantages.rloo import rloo
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.core.aggregation import AggregationPlug, decision_mean, episode_equal, token_mean
from trainer_backend.core.aggregation import constant as constant_aggregation
from trainer_backend.core.allocation import (
    AllocationPlug,
    ConstantSchedule,
    ExponentialSchedule,
    LinearSchedule,
    StepSchedule,
)
from trainer_backend.core.losses import (
    LossPlug,
    cispo_loss,
    clipped_policy_loss,
    policy_gradient_loss,
    sapo_loss,
)
from trainer_backend.core.presets import PRESETS
from trainer_backend.core.schedules import Fall, constant, cosine, linear
from trainer_backend.errors import JobError
from trainer_backend.sinks import OpenSink, TensorBoard, Trackio, Wandb
from trainer_backend.tool_formats.calls import ToolFormat
from trainer_backend.tool_formats.hermes import parse_hermes
from trainer_backend.tool_formats.llama import PYTHON_TAG, parse_llama
from trainer_backend.tool_formats.mistral import CALLS, parse_mistral
from trainer_backend.tool_formats.qwen3_coder import PARAMETER, parse_qwen3_coder
from trainer_backend.tool_formats.tags import OPEN
from trainer_backend.tool_formats.turnwise import CALL, ShortForm, parse_turnwise

Plug = TypeVar("Plug")

_OF_SCORES = frozenset({"episode_score"})
_ANCHOR_KEYS = _OF_SCORES | frozenset(
    {"state_hashing_function", "default_step_reward", "fnorm", "episode_baseline", "context_depth"}
    | {"context_alpha"}
)
_OF_ANCHORS = "compares a decision with those that reached its state, itself among them"
_SPREAD = "their sample standard deviation, or 1 where it is 0"
_OF_ITSELF = "counts an episode in its own baseline: (G - 1) / G"
_OF_GROUP = ("baseline", "mean of {compared} sibling[s] and itself")
_AT_TURN = ("baseline", "mean of {compared} sibling[s] at this turn (0 for one that has ended)")
_LATER = ("later", "what later decisions changed, discounted by gamma and lambda")
_OF_EPISODE = "episode_advantage = (score - score_baseline) / score_scale"
_OF_LEVELS = "advantage = episode_weight * episode_advantage + step_weight * step_advantage"
_OF_SCORE = ("score_baseline", "mean of the group")
_AT_STATE = "mean of {compared} other[s] in the same state and itself"
_TD_ERROR = "td_error = reward + discount * next_value - state_value"
_GIGPO = Derivation(
    (_OF_EPISODE, "step_advantage = (return - baseline) / scale", _OF_LEVELS),
    (_OF_SCORE, ("baseline", _AT_STATE)),
)
_OF_GRAPH = ("graph_baseline", "mean over the decisions of the group")
_LEVEL_KEYS = _OF_SCORES | {"state_hashing_function", "fnorm", "episode_baseline", "step_advantage_w"}
ESTIMATORS: dict[str, EstimatorPlug] = {
    "grpo": EstimatorPlug(
        grpo,
        Derivation(("advantage = (score - baseline) / scale",), (_OF_GROUP, ("scale", _SPREAD))),
        _OF_SCORES,
        divides_by_std=True,
        bias="divides by a standard deviation",
    ),
    "grpo_no_std": EstimatorPlug(
        grpo_no_std,
        Derivation(("advantage = score - baseline",), (_OF_GROUP,)),
        _OF_SCORES,
        bias=_OF_ITSELF,
    ),
    "dr_grpo": EstimatorPlug(
        grpo_no_std,
        Derivation(("advantage = score - baseline",), (_OF_GROUP,)),
        _OF_SCORES,
        bias=_OF_ITSELF,
        values={"training.aggregation": "constant"},
    ),
    "rloo": EstimatorPlug(
        rloo,
        Derivation(("advantage = score - baseline",), (("baseline", "mean of {compared} sibling[s]"),)),
        _OF_SCORES,
    ),
    "stepwise": EstimatorPlug(stepwise, Derivation(("advantage = return - baseline",), (_AT_TURN,))),
    "branch": EstimatorPlug(
        branch,
        Derivation(
            ("advantage = return - baseline",),
            (_AT_TURN, ("baseline", "mean of {branches} branch[es] from before this decision")),
        ),
        frozenset({"branches_per_episode", "branch_rollouts"}),
        needs_branches=True,
    ),
    "reinforce_pp": EstimatorPlug(
        reinforce_pp,
        Derivation(
            ("advantage = (return - baseline) / scale",),
            (
                ("baseline", "mean of {compared} other decision[s] of the batch and itself"),
                ("scale", _SPREAD),
            ),
        ),
        divides_by_std=True,
        compares_siblings=False,
        bias="divides by a standard deviation",
    ),
    "reinforce_pp_baseline": EstimatorPlug(
        reinforce_pp_baseline,
        Derivation(
            ("advantage = (score - baseline - batch_baseline) / scale",),
            (
                _OF_GROUP,
                ("batch_baseline", "mean of score - baseline over the decisions of the batch"),
                ("scale", _SPREAD),
            ),
        ),
        _OF_SCORES,
        divides_by_std=True,
        bias="divides by a standard deviation",
    ),
    "gae": EstimatorPlug(
        gae,
        Derivation(
            ("td_error = reward + discount * next_value - value", "advantage = td_error + later"), (_LATER,)
        ),
        frozenset({"gae_lambda", "bootstrap_truncated"}),
        needs_values="decision",
        compares_siblings=False,
    ),
    "gae_token": EstimatorPlug(
        gae_token,
        Derivation(
            ("advantage = td_error + later",),
            (("td_error", "what the decision changed, mean over its tokens"), _LATER),
        ),
        frozenset({"gae_lambda", "gae_token_lambda", "bootstrap_truncated"}),
        needs_values="token",
        compares_siblings=False,
    ),
    "gigpo": EstimatorPlug(
        gigpo,
        _GIGPO,
        _ANCHOR_KEYS | {"omega"},
        needs_state_keys=True,
        divides_by_std=True,
        bias=_OF_ANCHORS,
    ),
    "gigpo_additive": EstimatorPlug(
        gigpo_additive,
        _GIGPO,
        _ANCHOR_KEYS | {"step_advantage_w"},
        needs_state_keys=True,
        divides_by_std=True,
        bias=_OF_ANCHORS,
    ),
    "gigpo_soft": EstimatorPlug(
        gigpo_soft,
        Derivation(
            (_OF_EPISODE, "step_advantage = return - baseline", _OF_LEVELS),
            (_OF_SCORE, ("baseline", "mean by similarity, worth {compared} other[s] and itself")),
        ),
        _OF_SCORES | {"similarity_temperature", "episode_baseline", "step_advantage_w"},
        needs_texts=True,
        bias="compares a decision with those of similar states, itself among them",
    ),
    "g2po": EstimatorPlug(
        g2po,
        Derivation(
            (
                _OF_EPISODE,
                _TD_ERROR,
                "step_advantage = (td_error - baseline) / scale + (td_error - graph_baseline) / graph_scale",
                _OF_LEVELS,
            ),
            (_OF_SCORE, ("state_value", f"return, {_AT_STATE}"), ("baseline", _AT_STATE), _OF_GRAPH),
        ),
        _LEVEL_KEYS,
        needs_state_keys=True,
        divides_by_std=True,
        bias=f"{_OF_ANCHORS}, and trusts their mean returns",
    ),
    "graphgpo": EstimatorPlug(
        graphgpo,
        Derivation(
            (_OF_EPISODE, "step_advantage = (closeness - baseline) / scale", _OF_LEVELS),
            (_OF_SCORE, ("baseline", _AT_STATE), ("closeness", "{next_distance} decision[s] from the goal")),
        ),
        _LEVEL_KEYS | {"distance_discount", "goal_score"},
        needs_state_keys=True,
        divides_by_std=True,
        bias=f"{_OF_ANCHORS}, by distances and not by what was earned",
    ),
    "gagpo": EstimatorPlug(
        gagpo,
        Derivation(
            (_TD_ERROR, "advantage = (td_error + later - graph_baseline) / graph_scale"),
            (("state_value", f"return, {_AT_STATE}"), _LATER, _OF_GRAPH),
        ),
        frozenset({"state_hashing_function", "fnorm", "gae_lambda"}),
        needs_state_keys=True,
        divides_by_std=True,
        bias=f"{_OF_ANCHORS}, and trusts their mean returns",
    ),
}
_CLIP_KEYS = frozenset({"clip_low", "clip_high", "clip_dual"})
LOSSES: dict[str, LossPlug] = {
    "clipped": LossPlug(clipped_policy_loss, takes=_CLIP_KEYS),
    # arXiv:2503.14476, sections 2.3 and 3.1 to 3.3. refill_rounds as verl's recipe, of ten batches at most.
    "dapo": LossPlug(
        clipped_policy_loss,
        takes=_CLIP_KEYS,
        values={
            "training.clip_low": 0.2,
            "training.clip_high": 0.28,
            "training.aggregation": "token_mean",
            "training.skip_flat_groups": True,
            "training.refill_rounds": 9,
            "training.kl_coef": 0.0,
            "training.entropy_coef": 0.0,
        },
    ),
    "gspo": LossPlug(
        clipped_policy_loss,
        takes=_CLIP_KEYS,
        values={
            "algorithm.ratio_level": "decision",
            "training.clip_low": 3e-4,
            "training.clip_high": 4e-4,
            "training.aggregation": "decision_mean",
        },
    ),
    "cispo": LossPlug(
        cispo_loss,
        takes=frozenset({"clip_low", "clip_high"}),
        values={"training.clip_low": 1.0, "training.clip_high": 4.0, "training.aggregation": "token_mean"},
    ),
    "sapo": LossPlug(
        sapo_loss,
        takes=frozenset({"tau_pos", "tau_neg"}),
        values={"training.aggregation": "decision_mean"},
    ),
    "policy_gradient": LossPlug(policy_gradient_loss),
}
AGGREGATIONS: dict[str, AggregationPlug] = {
    "token_mean": AggregationPlug(token_mean),
    "decision_mean": AggregationPlug(decision_mean),
    "episode_equal": AggregationPlug(episode_equal, over="iteration"),
    "constant": AggregationPlug(constant_aggregation, over="plan"),
}
# A sink's library is imported when a job opens the sink.
SINKS: dict[str, OpenSink] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
SCHEDULES: dict[str, Fall] = {"linear": linear, "cosine": cosine, "constant": constant}
# Schedules of alpha, the probability that the actor instead of a fixed policy samples.
ALLOCATIONS: dict[str, AllocationPlug] = {
    "constant": AllocationPlug(ConstantSchedule),
    "linear": AllocationPlug(LinearSchedule),
    "exponential": AllocationPlug(ExponentialSchedule),
    "step": AllocationPlug(StepSchedule),
    "adaptive": AllocationPlug(AdaptiveSchedule),
}
# Formats of tool calls. The first marker found in a chat template decides: the template of Qwen3-Coder
# contains that of Hermes too.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "turnwise": ToolFormat(
        parse_turnwise,
        marker="'<|call|> '",
        openers=(CALL,),
        leaves_out_name=lambda tools: ShortForm.of(tools) is not None,
    ),
    "mistral": ToolFormat(parse_mistral, marker="[TOOL_CALLS]", openers=(CALLS,)),
    "qwen3_coder": ToolFormat(
        parse_qwen3_coder, marker="<function=", openers=(OPEN,), arguments_start=PARAMETER
    ),
    "hermes": ToolFormat(parse_hermes, marker="<tool_call>", openers=(OPEN,)),
    "llama": ToolFormat(parse_llama, marker="ipython", openers=("{", PYTHON_TAG)),
}
OperatorPlug = EstimatorPlug | LossPlug | AggregationPlug | AllocationPlug
# The boards to which an operator adds (operator_plugins.py), by the key of a job that takes their names. Each
# has its own type of plug.
OPEN_BOARDS: dict[str, dict[str, Any]] = {
    "algorithm.advantage": ESTIMATORS,
    "algorithm.loss": LOSSES,
    "training.aggregation": AGGREGATIONS,
    "rollout_allocation_schedule.type": ALLOCATIONS,
}
BUILT_IN = {board: frozenset(plugs) for board, plugs in OPEN_BOARDS.items()}
# Every key of a job that takes a name of a board; checks and documentation use it.
BOARDS: dict[str, Mapping[str, object]] = {
    **OPEN_BOARDS,
    "training.learning_rate_schedule": SCHEDULES,
    "model.preset": PRESETS,
    "model.tool_call_format": TOOL_FORMATS,
}

_OF_HEADS = frozenset({"value_coef", "value_trunk_gradient"})
_OF_OWN_CRITICS = frozenset(
    {"critic_learning_rate", "critic_passes", "critic_batch_decisions", "critic_warmup"}
)
_OF_CRITICS = frozenset({"critic", "value_clip", "value_learning_rate"}) | _OF_HEADS | _OF_OWN_CRITICS


def _keys(table: str, keys: Iterable[str]) -> frozenset[str]:
    return frozenset(f"{table}.{key}" for key in keys)


def _read_by(plug: OperatorPlug) -> frozenset[str]:
    match plug:
        case EstimatorPlug():
            critic = _OF_CRITICS if plug.needs_values else ()
            return _keys("algorithm", plug.takes) | _keys("training", critic)
        case AllocationPlug():
            return _keys("rollout_allocation_schedule", plug.needs | plug.takes)
        case _:
            return _keys("training", plug.takes)


# The job's keys that each name reads; a set key that only other names read is refused (`check`).
READS: dict[str, dict[str, frozenset[str]]] = {
    **{board: {name: _read_by(plug) for name, plug in plugs.items()} for board, plugs in OPEN_BOARDS.items()},
    "training.critic": {"head": _keys("training", _OF_HEADS), "own": _keys("training", _OF_OWN_CRITICS)},
    "training.learning_rate_schedule": {
        name: _keys("training", () if fall is constant else ("learning_rate_final",))
        for name, fall in SCHEDULES.items()
    },
}


def add_plug(board: str, name: str, plug: OperatorPlug) -> None:
    """Put a plug of the operator's own on its board."""
    OPEN_BOARDS[board][name] = plug
    READS[board][name] = _read_by(plug)


def remove_plug(board: str, name: str) -> None:
    """Take it away again."""
    del READS[board][name], OPEN_BOARDS[board][name]


def not_read(board: str, name: str) -> dict[str, list[str]]:
    """Return the keys that only other names of the board read, each with those names."""
    others = frozenset[str]().union(*READS[board].values()) - READS[board][name]
    return {key: [other for other, keys in READS[board].items() if key in keys] for key in sorted(others)}


def refuse_unknown(key: str, name: str) -> None:
    """Raise JobError with the known names if `key` of BOARDS does not take this one."""
    _plug(BOARDS[key], name, key=key)


def estimator(name: str) -> EstimatorPlug:
    """Return the named advantage estimator; JobError, which lists the names, if there is none."""
    return _plug(ESTIMATORS, name, key="algorithm.advantage")


def policy_loss(name: str) -> LossPlug:
    """Return the policy loss of that name, or raise JobError."""
    return _plug(LOSSES, name, key="algorithm.loss")


def aggregation(name: str) -> AggregationPlug:
    """Return the loss aggregation of that name, or raise JobError."""
    return _plug(AGGREGATIONS, name, key="training.aggregation")


def schedule(name: str) -> Fall:
    """Return the course of the learning rate after its rise, or raise JobError."""
    return _plug(SCHEDULES, name, key="training.learning_rate_schedule")


def allocation(name: str) -> AllocationPlug:
    """Return the allocation schedule of that name, or raise JobError."""
    return _plug(ALLOCATIONS, name, key="rollout_allocation_schedule.type")


def _plug(board: Mapping[str, Plug], name: str, *, key: str) -> Plug:
    if name in board:
        return board[name]
    told = did_you_mean(name, board)
    table = key.partition(".")[0]
    for home, plugs in BOARDS.items():
        if name in plugs and home.partition(".")[0] == table:  # `gspo` is no estimator, but a loss
            told = f". Did you mean {home} = {name!r}? Known: {', '.join(sorted(board))}"
    raise JobError(f"{key} is {name[:100]!r}{told}")
