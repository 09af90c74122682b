"""The registries of the trainer, called plug boards. A board maps each name that a job may choose to a plug.

A plug is an implementation, such as a loss function, with facts about the implementation, such as the job
keys that it reads. Importing this file does not import torch.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from shared_schemas.base import did_you_mean
from trainer_backend.core import advantages
from trainer_backend.core.adaptive import AdaptiveSchedule
from trainer_backend.core.advantages.episodes import EstimatorPlug
from trainer_backend.core.aggregation import AGGREGATIONS as AGGREGATIONS
from trainer_backend.core.aggregation import AggregationPlug
from trainer_backend.core.allocation import ALLOCATIONS as CONSTANT_ALLOCATIONS
from trainer_backend.core.allocation import AllocationPlug
from trainer_backend.core.critic import CRITICS, CriticKeys
from trainer_backend.core.forks import FORK_RULES
from trainer_backend.core.losses import LOSSES as LOSSES
from trainer_backend.core.losses import LossPlug
from trainer_backend.core.presets import PRESETS
from trainer_backend.core.schedules import SCHEDULES
from trainer_backend.core.starts import STARTS
from trainer_backend.errors import JobError
from trainer_backend.sinks import OpenSink, TensorBoard, Trackio, Wandb
from trainer_backend.tool_formats.calls import ToolFormat
from trainer_backend.tool_formats.harmony import parse_harmony
from trainer_backend.tool_formats.literals import (
    FUNCTION_GEMMA_OPEN,
    GEMMA_OPEN,
    LFM2_OPEN,
    parse_function_gemma,
    parse_gemma4,
    parse_lfm2,
    write_pythonic,
)
from trainer_backend.tool_formats.llama import PYTHON_TAG, parse_llama
from trainer_backend.tool_formats.parameters import KEY, PARAMETER, parse_glm, parse_qwen3_coder
from trainer_backend.tool_formats.tags import (
    CALLS,
    DEEPSEEK_OPEN,
    LIST_OPEN,
    NEMOTRON_OPEN,
    OPEN,
    parse_deepseek,
    parse_granite3,
    parse_hermes,
    parse_mistral,
    parse_nemotron2,
    write_hermes,
)
from trainer_backend.tool_formats.turnwise import CALL, ShortForm, parse_turnwise

Plug = TypeVar("Plug")

# Each file of core/advantages lists its estimators in PLUGS.
ESTIMATORS: dict[str, EstimatorPlug[Any]] = {
    name: plug
    for module in iter_modules(advantages.__path__)
    for name, plug in getattr(import_module(f"{advantages.__name__}.{module.name}"), "PLUGS", {}).items()
}
# A sink's library is imported when a job opens the sink.
SINKS: dict[str, OpenSink] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
# Schedules of alpha, the probability that the actor instead of a fixed policy samples.
ALLOCATIONS = {**CONSTANT_ALLOCATIONS, "adaptive": AllocationPlug(AdaptiveSchedule)}
# Formats of tool calls. A chat template has the first format of this table of which it contains a marker. So
# the order matters: the templates of qwen3_coder and glm contain the marker of hermes too. Replies in the
# formats gemma4 and harmony are not streamed, because their reasoning must not be sent as content.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "turnwise": ToolFormat(
        parse_turnwise,
        markers=("'<|call|> '",),
        openers=(CALL,),
        leaves_out_name=lambda tools: ShortForm.of(tools) is not None,
    ),
    "harmony": ToolFormat(parse_harmony, markers=("<|channel|>commentary",), ends=("<|call|>", "<|return|>")),
    "gemma4": ToolFormat(
        parse_gemma4,
        markers=("<|tool_call>call:",),
        openers=("", GEMMA_OPEN),
        arguments_start=r"\{",
        ends=("<turn|>", "<|tool_response>"),
    ),
    "function_gemma": ToolFormat(
        parse_function_gemma,
        markers=(FUNCTION_GEMMA_OPEN,),
        openers=(FUNCTION_GEMMA_OPEN,),
        arguments_start=r"\{",
        ends=("<end_of_turn>", "<start_function_response>"),
    ),
    "mistral": ToolFormat(parse_mistral, markers=(CALLS,), openers=(CALLS,)),
    "deepseek": ToolFormat(parse_deepseek, markers=(DEEPSEEK_OPEN,), openers=(DEEPSEEK_OPEN,)),
    "lfm2": ToolFormat(
        parse_lfm2,
        markers=(LFM2_OPEN, "<|tool_list_start|>"),
        openers=(LFM2_OPEN,),
        arguments_start=r"\(",
        write=write_pythonic,
    ),
    "nemotron2": ToolFormat(parse_nemotron2, markers=(NEMOTRON_OPEN,), openers=(NEMOTRON_OPEN,)),
    "granite3": ToolFormat(parse_granite3, markers=(LIST_OPEN,), openers=(LIST_OPEN,)),
    "qwen3_coder": ToolFormat(
        parse_qwen3_coder, markers=("<function=",), openers=(OPEN,), arguments_start=f"(?={PARAMETER})"
    ),
    "glm": ToolFormat(
        parse_glm,
        markers=(KEY,),
        openers=(OPEN,),
        arguments_start=f"(?={KEY})",
        ends=("<|user|>", "<|observation|>"),
    ),
    "hermes": ToolFormat(parse_hermes, markers=(OPEN,), openers=(OPEN,), write=write_hermes),
    "llama": ToolFormat(parse_llama, markers=("ipython",), openers=("{", PYTHON_TAG)),
}
OperatorPlug = EstimatorPlug[Any] | LossPlug | AggregationPlug | AllocationPlug
# Job key -> the board with the names that this key accepts, for boards to which operators may add plugs
# (operator_plugins.py). Each board has its own type of plug.
OPEN_BOARDS: dict[str, dict[str, Any]] = {
    "algorithm.advantage": ESTIMATORS,
    "algorithm.loss": LOSSES,
    "training.aggregation": AGGREGATIONS,
    "rollout_allocation_schedule.type": ALLOCATIONS,
}
BUILT_IN = {board: frozenset(plugs) for board, plugs in OPEN_BOARDS.items()}
# Job key -> the board with the names that this key accepts, for all boards; checks and documentation use it.
BOARDS: dict[str, Mapping[str, Any]] = {
    **OPEN_BOARDS,
    "algorithm.fork_rule": FORK_RULES,
    "training.learning_rate_schedule": SCHEDULES,
    "curriculum.rule": STARTS,
    "model.preset": PRESETS,
    "model.tool_call_format": TOOL_FORMATS,
}

# Job key of a board -> the job table whose keys the plugs of the board read.
READ_BY = {
    "algorithm.advantage": "algorithm",
    "algorithm.loss": "training",
    "training.aggregation": "training",
    "rollout_allocation_schedule.type": "rollout_allocation_schedule",
    "training.critic": "training",
    "training.learning_rate_schedule": "training",
}


def reads(board: str) -> dict[str, frozenset[str]]:
    """Return the dotted job keys that each plug of a board reads, by the name of the plug.

    A job that chooses one plug may not set a key that only other plugs read. `algorithm.gamma` is left out,
    because every job may set it.
    """
    if board == "training.critic":
        kinds = CRITICS
    else:
        kinds = {name: plug.keys for name, plug in BOARDS[board].items()}
    found = {
        name: frozenset(f"{READ_BY[board]}.{key}" for key in kind.model_fields) - {"algorithm.gamma"}
        for name, kind in kinds.items()
    }
    if board == "algorithm.advantage":
        of_critics = frozenset(f"training.{key}" for key in CriticKeys.model_fields)
        found |= {name: keys | of_critics for name, keys in found.items() if ESTIMATORS[name].needs_values}
    return found


def not_read(board: str, name: str) -> dict[str, list[str]]:
    """Return each key that plug `name` does not read, with the names of the board's plugs that read it."""
    readers = reads(board)
    others = frozenset[str]().union(*readers.values()) - readers[name]
    return {key: [other for other, keys in readers.items() if key in keys] for key in sorted(others)}


def refuse_unknown(key: str, name: str) -> None:
    """Raise JobError if the board of `key` has no plug with this name. The error lists the known names."""
    _find_plug(BOARDS[key], name, key=key)


def _find_plug(board: Mapping[str, Plug], name: str, *, key: str) -> Plug:
    """Return the plug with this name. Raises JobError, which lists the known names, if there is none."""
    if name in board:
        return board[name]
    told = did_you_mean(name, board)
    table = key.partition(".")[0]
    for home, plugs in BOARDS.items():
        if name in plugs and home.partition(".")[0] == table:  # `gspo` is no estimator, but a loss
            told = f". Did you mean {home} = {name!r}? Known: {', '.join(sorted(board))}"
    raise JobError(f"{key} is {name[:100]!r}{told}")


# Each of these functions returns the plug with a name, or raises the JobError of `_find_plug`.
estimator = partial(_find_plug, ESTIMATORS, key="algorithm.advantage")
fork_rule = partial(_find_plug, FORK_RULES, key="algorithm.fork_rule")
policy_loss = partial(_find_plug, LOSSES, key="algorithm.loss")
aggregation = partial(_find_plug, AGGREGATIONS, key="training.aggregation")
schedule = partial(_find_plug, SCHEDULES, key="training.learning_rate_schedule")
start_rule = partial(_find_plug, STARTS, key="curriculum.rule")
allocation = partial(_find_plug, ALLOCATIONS, key="rollout_allocation_schedule.type")
