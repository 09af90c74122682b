"""The role of a gateway's engine: its command, and its calls over a socket (`service_kit.socket_calls`)."""

import sys
from dataclasses import dataclass

from service_kit.rpc import Call, Table
from shared_schemas.base import Body
from shared_schemas.trajectory import Sampling
from trainer_backend.errors import EngineStopped, TrainerError
from trainer_backend.inference.actor import Generation, SampledToken
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.inference.worker import EngineCounters
from trainer_backend.job.tables import ModelTable
from trainer_backend.processes.launching import Role

_MODULE = "trainer_backend.processes.engine_process"


def engine_role(socket: int) -> Role:
    """It inherits the socket of its calls."""
    command = (sys.executable, "-m", _MODULE, "--socket", str(socket))
    return Role("engine", lambda place: command, descriptors=(socket,))


class EngineSetup(Body):
    """What an engine's process computes."""

    model: ModelTable
    keys: EngineKeys
    version: PolicyVersion
    """The version with which it begins."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A request for a sample; fields that `Extras` has too mean the same."""

    ids: tuple[int, ...]
    sampling: Sampling
    likeliest: int
    processed: bool
    common_draws: bool
    stop: tuple[str, ...]
    """Strings that end it, in the text that the policy's tokenizer gives."""
    streams: bool
    """Whether each token is sent as it comes."""


# `serve` comes first, and its one progress says that the engine answers; its result says why that can answer
# no more. The others return the counts of the engine, too.
ENGINE_CALLS = Table(
    {
        "serve": Call(tuple[EngineSetup], str, progress=tuple[()]),
        # With the likeliest tokens of each place.
        "generate": Call(
            tuple[EngineCall],
            tuple[Generation, EngineCounters],
            progress=tuple[SampledToken],
            most_reply_bytes=256 << 20,
        ),
        "load": Call(tuple[PolicyVersion], EngineCounters),
        "probe": Call(tuple[()], EngineCounters),
    },
    errors=TrainerError,
    failure=EngineStopped,
)
