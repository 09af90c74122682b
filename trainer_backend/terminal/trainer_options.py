"""The options of `turnwise trainer`: what the operator decides, and no posted job."""

from pathlib import Path
from typing import Annotated

import typer

Host = Annotated[
    str, typer.Option(help="address of this machine to listen on; beyond loopback it needs a key")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")]
DataDir = Annotated[Path, typer.Option(help="where run directories are, and the store")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar="TURNWISE_DATABASE_URL",
        show_envvar=True,
        show_default=False,
        help="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE; absent: DATA_DIR/turnwise.db",
    ),
]
MaxJobs = Annotated[int, typer.Option(min=1, help="jobs that run at a time; the rest waits")]
RunsJobs = Annotated[bool, typer.Option("--jobs/--no-jobs", help="--no-jobs only shows the runs of DATA_DIR")]
Restarts = Annotated[
    int, typer.Option(min=0, help="of a job whose process crashed, without an iteration in between")
]
StopGrace = Annotated[
    float, typer.Option(min=0, help="for a job to save what is finished, before it is killed")
]
Roots = Annotated[
    list[Path] | None,
    typer.Option(help="a folder that posted jobs may name files in; may be repeated; absent: configs"),
]
TaskUrls = Annotated[
    list[str] | None,
    typer.Option(help="a task app that posted jobs may name, beside those of TASK_URL; it is sent their key"),
]
InferenceHosts = Annotated[
    list[str] | None,
    typer.Option(help="host or host:port that warmup.policy_config.inference_url of a posted job may name"),
]
KeyVariables = Annotated[
    list[str] | None, typer.Option(help="an environment variable that a posted job may take a key from")
]
Models = Annotated[
    list[str] | None,
    typer.Option(help="models of the hub that posted jobs may name, such as 'Qwen/*'; may be repeated"),
]
GatewayHost = Annotated[
    str,
    typer.Option(envvar="GATEWAY_HOST", show_envvar=True, help="where task apps reach the gateways of jobs"),
]
ExitWithParent = Annotated[bool, typer.Option(help="end when standard input closes")]
