"""The learner's process as the orchestrator sees it: its command, its resources and its HTTP calls.

    POST /calls/{name}      headers: the key, the orchestrator's session, the number of the call
                            body: the arguments as a JSON array, and the bytes of arrays (core.columns)
    POST /stop              stops the call whose number is in the header, at its next progress report
    POST /leave             ends the session, so that the learner may serve another run
    GET  /about             returns `About`: version, run and current call

`service_kit.rpc` defines the encoding. The orchestrator and the learner both import this module, so it does
not import torch, which the orchestrator does not need.
"""

import sys
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
from trainer_backend.job.tables import LearnerTable
from trainer_backend.parts import CreditedEpisode, Hardware, Progress, WeightPart
from trainer_backend.processes.launching import LEARNER, Place, Resources, Role

# The environment variable that contains the key of a learner's process.
LEARNER_KEY = "TURNWISE_LEARNER_KEY"
# The environment variables from which the key of a learner that the orchestrator did not start is read.
KEYS_OF_THE_LEARNER = frozenset({LEARNER_KEY, f"{LEARNER_KEY}_FILE"})
SESSION_HEADER, NUMBER_HEADER = "X-Turnwise-Session", "X-Turnwise-Call"
_MOST_BYTES = 16 << 30


# Variables that are not passed on to the learner. If torchrun started this process, they contain its rank;
# the learner's ranks have numbers of their own.
_OF_RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})


def learner_role(table: LearnerTable, device: str, key: str, log_file: Path) -> Role:
    """Return how to start the learner: command, environment and resources of its process on each node.

    With several ranks, this process starts the ranks of its node. `device` is the job's `model.device`.
    """
    resources = Resources(LEARNER, table.nnodes, processes=table.nproc_per_node, device=device)
    command = partial(_command, table)
    return Role(
        LEARNER, command, {LEARNER_KEY: key}, log_file, withheld=_OF_RANKS, resources=resources
    )  # fmt: skip


def _command(table: LearnerTable, place: Place) -> tuple[str, ...]:
    own = () if place.host is None else ("--host", place.host)
    if table.ranks == 1:
        return (sys.executable, "-m", "trainer_backend.learner.process", *own)
    meeting: tuple[str, ...] = ("--standalone",)
    if table.nnodes > 1:
        meeting = (
            f"--nnodes={table.nnodes}", f"--node-rank={place.rank}",
            f"--master-addr={place.meeting[0]}", f"--master-port={place.meeting[1]}",
        )  # fmt: skip
    ranks = f"--nproc-per-node={table.nproc_per_node}"
    return (sys.executable, "-m", "trainer_backend.learner.group", *meeting, ranks, "--", *own)


class About(Body):
    """Describes a running learner: the answer to GET /about."""

    version: str
    """Version of the Turnwise package."""
    run: str = ""
    """The run that the learner serves; empty if it serves none."""
    call: str = ""
    """Number and name of the current call, such as "3, 'update'"; empty if there is none."""


_Episodes = tuple[dict[str, list[Segment]]]
_Metrics = dict[str, float]
_STEPS = tuple[int, int]  # done, and in total
# A call whose arguments contain tokens, possibly all tokens of an iteration, with 4 to 12 bytes per token.
_tokens = partial(Call, most_argument_bytes=_MOST_BYTES, encode=columns.encoded, decode=columns.decoded)
# Such a call that also returns two numbers per token, of at most 25 digits each.
_numbers = partial(_tokens, reply_growth=16)
# The calls by name. The first call of a session is `open`. `fresh` or `resumed` must precede the methods of
# `parts.Learner`; `gradient_cosines` needs only `open`. Calls that report progress can be stopped.
CALLS = Table(
    {
        "open": Call(tuple[str], None),
        "sees": Call(tuple[Path, str], bool),
        "fixed_folders": Call(tuple[Path | None], dict[str, Path]),
        "plan_memory": Call(tuple[Path | None, list[Path]], str),
        "fresh": _tokens(tuple[list[Trajectory], Path | None], None),
        "resumed": Call(tuple[Path], Progress),
        "gradient_cosines": _tokens(
            tuple[Path, list[CreditedEpisode], dict[str, list[OfEpisode]]],
            list[tuple[str, str, float]],
            progress=_STEPS,
        ),
        "warm_up": _tokens(tuple[list[Trajectory]], _Metrics, progress=_STEPS),
        "values": _numbers(_Episodes, dict[str, OfEpisode]),
        "score": _numbers(_Episodes, dict[str, ScoredTokens]),
        "update": _tokens(tuple[list[CreditedEpisode], int, int | None], _Metrics),
        "save": Call(tuple[Path, Progress], None),
        "publish": Call(tuple[Path, WeightPart], None),
        "offer": Call(tuple[str], tuple[str, int]),
        "broadcast": Call(tuple[int, float], int, progress=_STEPS),
        "find_long": _numbers(tuple[list[list[dict[str, Any]]], int], list[LongPrompt]),
        "score_ids": _numbers(tuple[list[int]], list[float]),
        "hardware": Call(tuple[()], Hardware),
    },
    errors=TrainerError,
    failure=LearnerFailed,
)


def parse_run(session: str) -> str:
    """Return RUN from a session name RUN/START. Each start of a run has its own session name."""
    return session.rpartition("/")[0]
