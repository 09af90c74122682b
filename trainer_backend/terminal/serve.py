"""`turnwise serve RUN_OR_FOLDER`: serve a model through the gateway to any OpenAI client."""

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import SecretStr

from service_kit.server import Listener
from shared_schemas.chat import RESPONSE_FORMAT, StructuredOutput
from trainer_backend.inference.chat_request import OF_LIBRARIES
from trainer_backend.inference.gateway_app import GatewayLimits
from trainer_backend.job.load import LoadedJob, load_job, parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.models.layout import read_config, text_sizes
from trainer_backend.processes.policy_server import FolderPolicy, PolicyServer
from trainer_backend.run.stopping import stop_on_signals
from trainer_backend.rundir.checkpoint_paths import find_run, model_in

# The longest context of a model folder without a job. The memory of the KV cache grows with this number.
_LONGEST = 8192


def what_to_serve(folder: Path, job_path: Path | None, overrides: Sequence[str]) -> tuple[LoadedJob, Path]:
    """Return the job and the model folder that the arguments of the command describe.

    `folder` is a run (whose best checkpoint is served), a checkpoint, or a model folder. Without `job_path`,
    the run's job is used, or for a model folder a job with default values.
    """
    run = find_run(folder)
    if job_path is not None or run is not None:
        loaded = load_job(job_path or (run or Path()) / "job.toml", overrides, runs_plugins=False)
        return loaded, model_in(folder)
    positions = text_sizes(read_config(folder)).get("max_position_embeddings")
    document = {
        "job": {"name": re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip(".-")[:60] or "model"},
        "model": {"path": str(folder)},
        "inference": {"max_model_len": min(positions or _LONGEST, _LONGEST)},
    }
    return parse_job(document, where="turnwise serve", overrides=overrides), folder


async def serve(
    job: JobConfig,
    folder: Path,
    key: SecretStr | None,
    say: Callable[[str], None],
    *,
    structured_output: StructuredOutput,
) -> None:
    """Serve the model in `folder` as `{job}/actor` until stopped; `say` receives lines for the user.

    Callers must send `key`. It may be None if only this machine can reach the address. No grammar is
    enforced: `structured_output` says whether a response_format is refused or ignored.
    """
    refused = {RESPONSE_FORMAT} if structured_output is StructuredOutput.REJECT else set()
    # Reserve the port first: if it is taken, the weights need not be read.
    stopping = stop_on_signals(tell=lambda _: say("stopping"), log=lambda _: None)
    with stopping as stop, Listener(job.services.gateway_host, job.services.gateway_port) as listener:
        limits = GatewayLimits(leaves_out=OF_LIBRARIES - refused)
        server = PolicyServer(job.job.name, listener, job.inference, key=key or "none", gateway_limits=limits)
        policy = await asyncio.to_thread(FolderPolicy, job.model, server, folder)
        say(policy.plan.report())
        with policy.serving() as inference:
            who = "" if key else ", to this machine alone, without a key"
            say(f"{folder} is served as {inference.model} at {inference.url}/v1{who}; Ctrl-C ends it")
            await policy.while_serving(stop.wait())
