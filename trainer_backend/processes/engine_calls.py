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
    """Return the role of an engine process, which inherits the socket of its calls."""
    command = (sys.executable, "-m", _MODULE, "--socket", str(socket))
    return Role("engine", lambda place: command, descriptors=(socket,))


class EngineSetup(Body):
    model: ModelTable
    keys: EngineKeys
    version: PolicyVersion
    """The version that the engine serves first."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A request for a sample; `Extras` explains most fields."""

    ids: tuple[int, ...]
    sampling: Sampling
    likeliest: int
    processed: bool
    common_draws: bool
    stop: tuple[str, ...]
    """Strings that end the sample, in the text that the policy's tokenizer decodes."""
    streams: bool
    """Whether each token is sent as soon as it is sampled."""


# `serve` comes first: its single progress message means that the engine answers, and its result is the reason
# why the engine stopped. The other calls also return the engine's counters.
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
