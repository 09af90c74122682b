"""The options of `turnwise trainer`, set by the operator and by no posted job.

Typer makes the command line, environment variables, bounds, help and tab completion from this declaration. It
imports no other module of ours, because every start of `turnwise` reads it.
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
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one")] = 8100
    data_dir: Annotated[Path, Option(help="where run directories are, and the store")] = Path("runs")
    database_url: Annotated[
        str | None,
        Option(
            envvar="TURNWISE_DATABASE_URL",
            show_envvar=True,
            show_default=False,
            help="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE; absent: DATA_DIR/turnwise.db",
        ),
    ] = None
    max_jobs: Annotated[int, Option(min=1, help="jobs that run at a time; others wait")] = 1
    jobs: Annotated[bool, Option("--jobs/--no-jobs", help="--no-jobs only shows the runs of DATA_DIR")] = True
    restarts: Annotated[
        int, Option(min=0, help="restarts of a job that crashes without finishing an iteration in between")
    ] = 3
    stop_grace_s: Annotated[
        float, Option(min=0, help="seconds for a job to save finished work before it is killed")
    ] = 100.0
    roots: Annotated[
        list[Path] | None,
        Option(
            "--allow-root",
            help="a folder that posted jobs may name files in; may be repeated; absent: configs",
        ),
    ] = None
    task_urls: Annotated[
        list[str] | None,
        Option(
            "--allow-task-url",
            help="a task app that posted jobs may name, beside those of TASK_URL; it is sent their key",
        ),
    ] = None
    inference_hosts: Annotated[
        list[str] | None,
        Option(
            "--allow-inference-host",
            help="host or host:port that an inference_url of a posted job may name",
        ),
    ] = None
    key_variables: Annotated[
        list[str] | None,
        Option("--allow-key-variable", help="an environment variable that a posted job may take a key from"),
    ] = None
    models: Annotated[
        list[str] | None,
        Option(
            "--allow-model",
            help="models of the hub that posted jobs may name, such as 'Qwen/*'; may be repeated",
        ),
    ] = None
    plugins: Annotated[
        list[Path] | None,
        Option(
            "--plugins",
            help="a Python file with estimators, losses, aggregations or schedules that posted jobs may "
            "name; may be repeated",
        ),
    ] = None
    clusters: Annotated[
        list[str] | None,
        Option(
            "--allow-cluster",
            help="a learner.url or cluster.ray_address that posted jobs may name; the one is sent the "
            "learner's key, the other starts processes; may be repeated",
        ),
    ] = None
    gateway_host: Annotated[
        str,
        Option(envvar="GATEWAY_HOST", show_envvar=True, help="where task apps reach the gateways of jobs"),
    ] = "127.0.0.1"
    exit_with_parent: Annotated[bool, Option(help="end when standard input closes")] = False
