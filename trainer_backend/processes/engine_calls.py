"""Defines how a gateway starts and calls the process of its engine.

The calls travel over a socket (`service_kit.socket_calls`).
"""

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
    """Return the role of an engine process. The process inherits `socket` and receives its calls there."""
    command = (sys.executable, "-m", _MODULE, "--socket", str(socket))
    return Role("engine", lambda place: command, descriptors=(socket,))


class EngineSetup(Body):
    model: ModelTable
    keys: EngineKeys
    version: PolicyVersion
    """The first version that the engine serves."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """The arguments of a generation request; `Extras` explains most of the fields."""

    ids: tuple[int, ...]
    sampling: Sampling
    likeliest: int
    processed: bool
    common_draws: bool
    stop: tuple[str, ...]
    """Strings that end the generation once the decoded text contains one of them."""
    streams: bool
    """Whether each token is sent as soon as it is sampled."""


# `serve` must be the first call. Its only progress message means that the engine accepts calls; its result is
# the reason why the engine stopped. The other calls also return the engine's counters.
ENGINE_CALLS = Table(
    {
        "serve": Call(tuple[EngineSetup], str, progress=tuple[()]),
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
