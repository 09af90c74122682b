"""The calls to a learner in a process of its own: their arguments and results as JSON, and their errors.

    POST /calls/{name}      headers: the key, the session of the orchestrator, the number of the call
                            body: the arguments, a JSON array, and the bytes of what it names (core.columns)
    POST /stop              ends the call with that number after its next progress
    POST /leave             the run has ended: the learner may serve another one
    GET  /about             `About`: what is there, for which run, and what it does

`service_kit.rpc` says how they cross. No torch here: both sides read it.
"""

from functools import partial
from pathlib import Path
from typing import Any

from service_kit.rpc import Call, Table
from shared_schemas.base import Body
from shared_schemas.trajectory import Trajectory
from trainer_backend.core import columns
from trainer_backend.core.critic import OfEpisode
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.prompt_lengths import LongPrompt
from trainer_backend.core.segments import Segment
from trainer_backend.errors import LearnerFailed, TrainerError
from trainer_backend.protocols import CreditedEpisode, Hardware, Progress, WeightPart

# The environment variable with the key of a learner's process.
LEARNER_KEY = "TURNWISE_LEARNER_KEY"
# Where an orchestrator may have that of somebody else's learner.
KEYS_OF_THE_LEARNER = frozenset({LEARNER_KEY, f"{LEARNER_KEY}_FILE"})
SESSION_HEADER, NUMBER_HEADER = "X-Turnwise-Session", "X-Turnwise-Call"
MOST_BODY_BYTES = 16 << 30


class About(Body):
    """What answers at a learner's address."""

    version: str
    """Version of the package."""
    run: str = ""
    """The run that it works for; empty: none yet."""
    call: str = ""
    """The call that it is busy with, "3, 'update'"; empty: none."""


_Episodes = tuple[dict[str, list[Segment]]]
_Metrics = dict[str, float]
_STEPS = tuple[int, int]  # done, and in total
# Arguments hold all tokens of an iteration, at 4 to 12 bytes each, and some replies a number for each of
# them. Only the orchestrator and its learner send them.
_call = partial(Call, most_argument_bytes=MOST_BODY_BYTES, encode=columns.encoded, decode=columns.decoded)
# By name: `open` comes first, then `fresh` or `resumed`, and then the methods of `protocols.Learner`;
# `gradient_cosines` needs `open` alone. Those with progress heed a stop.
CALLS = Table(
    {
        "open": _call(tuple[str], None),
        "sees": _call(tuple[Path, str], bool),
        "fixed_folders": _call(tuple[Path | None], dict[str, Path]),
        "plan_memory": _call(tuple[Path | None, list[Path]], str),
        "fresh": _call(tuple[list[Trajectory], Path | None], None),
        "resumed": _call(tuple[Path], Progress),
        "gradient_cosines": _call(
            tuple[Path, list[CreditedEpisode], dict[str, list[OfEpisode]]],
            list[tuple[str, str, float]],
            progress=_STEPS,
        ),
        "warm_up": _call(tuple[list[Trajectory]], _Metrics, progress=_STEPS),
        "values": _call(_Episodes, dict[str, OfEpisode], most_reply_bytes=MOST_BODY_BYTES),
        "score": _call(_Episodes, dict[str, ScoredTokens], most_reply_bytes=MOST_BODY_BYTES),
        "update": _call(tuple[list[CreditedEpisode], int, int | None], _Metrics),
        "save": _call(tuple[Path, Progress], None),
        "publish": _call(tuple[Path, WeightPart], None),
        "offer": _call(tuple[str], tuple[str, int]),
        "broadcast": _call(tuple[int, float], int, progress=_STEPS),
        "find_long": _call(
            tuple[list[list[dict[str, Any]]], int], list[LongPrompt], most_reply_bytes=MOST_BODY_BYTES
        ),
        "logprobs_of": _call(tuple[list[int]], list[float], most_reply_bytes=MOST_BODY_BYTES),
        "hardware": _call(tuple[()], Hardware),
    },
    errors=TrainerError,
    failure=LearnerFailed,
)


def session_of(run: str, start: str) -> str:
    """The name of an orchestrator: its run, and which of the run's starts it is."""
    return f"{run}/{start}"


def run_of(session: str) -> str:
    """The run of a session."""
    return session.rpartition("/")[0]
