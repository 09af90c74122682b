"""The options of `turnwise task-app`: typer makes the command line, its bounds and its help from them.

It imports no other module of ours, so that help and mistakes are told at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True, slots=True)
class Flags:
    """The values of the options."""

    host: Annotated[
        str, Option(help="address of this machine to listen on; beyond loopback it needs a key")
    ] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free port")] = 8001
    inference_hosts: Annotated[
        list[str] | None,
        Option(
            "--allow-inference-host",
            help="host or host:port that an inference_url may name, as those of "
            "TURNWISE_ALLOWED_INFERENCE_HOSTS may be; may be repeated",
        ),
    ] = None
    plugins: Annotated[
        list[Path] | None,
        Option(
            "--plugins",
            help="a Python file with environments or policies of your own (docs/plugins.md); may be repeated",
        ),
    ] = None
    interactions: Annotated[
        Path | None, Option(help="the YAML or TOML file of interactions (docs/plugins.md)")
    ] = None
    state_dir: Annotated[
        Path | None,
        Option(help="write sessions there: after a restart or a kill each continues from its last decision"),
    ] = None
    replicas: Annotated[
        int | None,
        Option(
            min=1,
            max=256,
            help="serve so many task apps on consecutive ports, and restart each when it dies",
        ),
    ] = None
    exit_with_parent: Annotated[bool, Option("--exit-with-parent", help="end when standard input closes")] = (
        False
    )
