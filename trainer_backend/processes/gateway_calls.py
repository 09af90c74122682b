"""The role of a gateway process: its command, its setup and its calls. No torch here.

The process prints an address when it is ready. There it answers calls, which have another key than requests.
`serve` comes first and lasts as long as the gateway serves; its progress messages are events for the run.
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
from trainer_backend.processes.launching import Place
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.rundir.state import ProcessRole

# Environment variables with the key of requests to a gateway, and with the key of the run's calls to it.
GATEWAY_KEY, CONTROL_KEY = "TURNWISE_GATEWAY_KEY", "TURNWISE_CONTROL_KEY"


def gateway_command(name: str, socket: int, place: Place) -> tuple[str, ...]:
    """Return the command line that starts a gateway process.

    Without `place.host` the process is on this machine, and inherits `socket`, open at its public address.
    """
    where = ("--socket", str(socket)) if place.host is None else ("--host", place.host)
    return (sys.executable, "-m", "trainer_backend.processes.gateway_process", name, *where)


class GatewaySetup(Body):
    job_name: str
    model: ModelTable
    inference: InferenceTable
    """[inference] with this gateway's share of threads and servers."""
    fixed: FixedSetup
    run: Path
    """The run's directory, with the record of its fixed policies."""
    version: PolicyVersion
    """The version that the process serves first."""
    probes: bool
    """Whether servers of fixed policies are probed; not after a restart, which they must not prevent."""


class Line(Body):
    """Text for the run. By kind: the address that answers requests from now on (serving), the address of a
    vLLM server that must be restarted (server_away), or a line for the user (say)."""

    kind: Literal["serving", "server_away", "say"]
    text: str


class Sign(Body):
    """Sent when the first request is answered, or a vLLM server is about to ask the learner for weights."""

    kind: Literal["answered", "server_asks"]


class ProcessChanged(Body):
    """A process that this gateway watches has changed; for the fields see `Reporter.process`."""

    kind: Literal["process_changed"] = "process_changed"
    name: str
    role: ProcessRole
    state: str
    version: int | None = None
    word: str = ""


Event = Annotated[Line | Sign | ProcessChanged, Field(discriminator="kind")]

GATEWAY_CALLS = Table(
    {
        # The result is the reason why the policies can no longer be served; empty after a stop.
        "serve": Call(tuple[GatewaySetup], str, progress=tuple[Event]),
        # WeightsRefused: the previous version is still served.
        "load": Call(tuple[PolicyVersion], None),
        # Lets the run's vLLM servers sleep until the next load.
        "release": Call(tuple[()], None),
        # Returns the actor's counts since the start of the process.
        "totals": Call(tuple[()], dict[str, int | float]),
        # Returns once the engine has given a sign of life.
        "probe": Call(tuple[()], None),
        # Checks that local fixed policies are unchanged; returns a line for each.
        "verify": Call(tuple[()], list[str]),
        # Takes the former and the new address of a vLLM server.
        "move_server": Call(tuple[str, str], None),
    },
    errors=TrainerError,
    failure=InferenceError,
)
