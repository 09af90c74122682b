"""Defines how a run starts and calls a gateway process: command, setup and calls.

When the process is ready, it prints the address at which it answers these calls. Calls and requests have
different keys. `serve` is the first call and lasts until the gateway stops serving; its progress messages are
events for the run. This module does not import torch.
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

# Environment variables that contain the key for requests to a gateway, and the key for the run's calls to it.
GATEWAY_KEY, CONTROL_KEY = "TURNWISE_GATEWAY_KEY", "TURNWISE_CONTROL_KEY"


def gateway_command(name: str, socket: int, place: Place) -> tuple[str, ...]:
    """Return the command line that starts a gateway process.

    Without `place.host`, the process is on this machine and inherits `socket`, which listens at the gateway's
    public address.
    """
    where = ("--socket", str(socket)) if place.host is None else ("--host", place.host)
    return (sys.executable, "-m", "trainer_backend.processes.gateway_process", name, *where)


class GatewaySetup(Body):
    job_name: str
    model: ModelTable
    inference: InferenceTable
    """[inference], reduced to this gateway's share of threads and servers."""
    fixed: FixedSetup
    run: Path
    """The run's directory, which contains the record of the fixed policies."""
    version: PolicyVersion
    """The version that the process serves first."""
    probes: bool
    """Whether to probe the servers of fixed policies. False after a restart of the gateway, so that a server
    that does not answer cannot prevent the restart."""


class Line(Body):
    """A line of text for the run.

    The text depends on the kind. "serving": the address that answers requests from now on; "server_away":
    the address of a vLLM server that must be restarted; "say": a message for the user.
    """

    kind: Literal["serving", "server_away", "say"]
    text: str


class Sign(Body):
    """Reports that the first request was answered, or that a vLLM server is about to ask for weights."""

    kind: Literal["answered", "server_asks"]


class ProcessChanged(Body):
    """Reports a change of a process that this gateway watches; `Reporter.process` explains the fields."""

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
        # Checks that local fixed policies are unchanged; returns one line for each policy.
        "verify": Call(tuple[()], list[str]),
        # Takes the former and the new address of a vLLM server.
        "move_server": Call(tuple[str, str], None),
    },
    errors=TrainerError,
    failure=InferenceError,
)
