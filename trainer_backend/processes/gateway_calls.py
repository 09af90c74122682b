"""The calls of a run to a gateway that is a process of its own (`service_kit.rpc`). No torch here.

The process answers at the address of its ready line, under a key of their own. `serve` comes first and lasts
as long as the gateway serves: its progress is what the run hears of it.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from service_kit.rpc import Call, Table
from shared_schemas.base import Body
from trainer_backend.errors import InferenceError, TrainerError
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.job.tables import InferenceTable, ModelTable
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.rundir.state import ProcessRole

# Environment variables with the keys of a gateway, and of the calls to it.
GATEWAY_KEY, CONTROL_KEY = "TURNWISE_GATEWAY_KEY", "TURNWISE_CONTROL_KEY"


class GatewaySetup(Body):
    """What a gateway's process serves."""

    job_name: str
    model: ModelTable
    inference: InferenceTable
    """[inference] with this gateway's share of threads and servers."""
    fixed: FixedSetup
    run: Path
    """The run's directory, which has the record of its fixed policies."""
    version: PolicyVersion
    """The one that it begins with."""
    probes: bool
    """Whether the servers of fixed policies are tried: one that is away for a moment must not keep a gateway
    from being started again."""


class Serving(Body):
    """It answers requests."""

    kind: Literal["serving"] = "serving"
    url: str


class Answered(Body):
    """It has answered its first request, so its process has been of use."""

    kind: Literal["answered"] = "answered"


class Said(Body):
    """A line for the run's user."""

    kind: Literal["said"] = "said"
    text: str


class ServerAway(Body):
    """A vLLM server of the run does not come back, and is to be started again."""

    kind: Literal["server_away"] = "server_away"
    url: str


class ServerAsks(Body):
    """A vLLM server is about to ask the learner for the weights."""

    kind: Literal["server_asks"] = "server_asks"


class ProcessChanged(Body):
    """A process that this gateway watches has changed; the fields are those of `Reporter.process`."""

    kind: Literal["process_changed"] = "process_changed"
    name: str
    role: ProcessRole
    state: str
    version: int | None = None
    word: str = ""


Event = Annotated[
    Serving | Answered | Said | ServerAway | ServerAsks | ProcessChanged, Field(discriminator="kind")
]

GATEWAY_CALLS = Table(
    {
        # Its result says why the policies cannot be served any more; empty: it was asked to stop.
        "serve": Call(tuple[GatewaySetup], str, progress=tuple[Event]),
        # WeightsRefused: the version before continues to be served.
        "load": Call(tuple[PolicyVersion], None),
        # Its vLLM servers sleep until the next load.
        "release": Call(tuple[()], None),
        # The actor's counts since the start of the process.
        "totals": Call(tuple[()], dict[str, int | float]),
        # It ends once the engine has given a sign of life.
        "probe": Call(tuple[()], None),
        # A line for each fixed policy with a local model, whose weights are as they were loaded.
        "verify": Call(tuple[()], list[str]),
        # A vLLM server has another address from now on: the one before, and the new one.
        "move_server": Call(tuple[str, str], None),
    },
    errors=TrainerError,
    failure=InferenceError,
)
