"""The role of a gateway that is a process of its own: command, needs and calls. No torch here.

The process answers at the address of its ready line, under a key of their own. `serve` comes first and lasts
as long as the gateway serves: its progress messages are events for the run.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from service_kit.rpc import Call, Table
from shared_schemas.base import Body
from trainer_backend.errors import InferenceError, TrainerError
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.job.tables import InferenceTable, ModelTable
from trainer_backend.processes.launching import Place, Resources
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.rundir.state import ProcessRole

# Environment variables with the keys of a gateway, and of the calls to it.
GATEWAY_KEY, CONTROL_KEY = "TURNWISE_GATEWAY_KEY", "TURNWISE_CONTROL_KEY"


def gateway_command(name: str, socket: int, place: Place) -> tuple[str, ...]:
    """On this machine it inherits the socket of its public address."""
    where = ("--socket", str(socket)) if place.host is None else ("--host", place.host)
    return (sys.executable, "-m", "trainer_backend.processes.gateway_process", name, *where)


def gateway_resources(engine: str, count: int, device: str) -> Resources | None:
    """What all gateways need; None: without engines in them they stay with the orchestrator."""
    return Resources("gateways", count, device=device) if engine == "local" else None


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


class Line(Body):
    """Text for the run: the address where requests are answered from now on; that of a vLLM server which does
    not come back, and is to be started again; or a line for the run's user."""

    kind: Literal["serving", "server_away", "say"]
    text: str


class Sign(Body):
    """The first request is answered, so the process has been of use; or a vLLM server is about to ask the
    learner for the weights."""

    kind: Literal["answered", "server_asks"]


class ProcessChanged(Body):
    """A process that this gateway watches has changed; the fields are those of `Reporter.process`."""

    kind: Literal["process_changed"] = "process_changed"
    name: str
    role: ProcessRole
    state: str
    version: int | None = None
    word: str = ""


Event = Annotated[Line | Sign | ProcessChanged, Field(discriminator="kind")]

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
