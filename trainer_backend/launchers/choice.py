"""The launcher that a job names, and what the job's roles need of machines."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trainer_backend.errors import JobError
from trainer_backend.job.schema import JobConfig
from trainer_backend.launchers.external import ExternalLauncher
from trainer_backend.launchers.launcher import LEARNER, LOCAL, Launcher, Resources


@asynccontextmanager
async def launcher_of(job: JobConfig, run_id: str, say: Callable[[str], None]) -> AsyncIterator[Launcher]:
    """The launcher that the job names, until the context is left.

    Args:
        run_id: the name of the run's places.
        say: is given a line where a place is waited for.

    Raises:
        JobError: there is no Ray, or it is of another version.
        NotPlaced: Ray starts no actor.
    """
    cluster = job.cluster
    if cluster is None or cluster.launcher == "local":
        yield LOCAL
    elif cluster.launcher == "external":
        yield ExternalLauncher({LEARNER: job.learner.url})
    else:
        try:
            from trainer_backend.launchers.ray import RayLauncher
        except ModuleNotFoundError as error:
            raise JobError("cluster.launcher = 'ray' needs `pip install 'turnwise[ray]'`") from error
        launcher = RayLauncher(run_id, cluster.wait_s, say)
        await launcher.open(cluster.ray_address)
        try:
            yield launcher
        finally:
            await launcher.close()


def gateway_resources(job: JobConfig) -> Resources | None:
    """What gateways with engines in them need; None: they have none, and stay beside the orchestrator."""
    if job.inference.engine != "local":
        return None
    return Resources("gateways", job.services.gateways, device=job.model.device)


def learner_resources(job: JobConfig) -> Resources:
    """What the learner needs."""
    table = job.learner
    return Resources(LEARNER, table.nnodes, processes=table.nproc_per_node, device=job.model.device)
