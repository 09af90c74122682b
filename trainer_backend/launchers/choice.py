"""The launcher that a job names."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trainer_backend.errors import JobError
from trainer_backend.job.tables import ClusterTable
from trainer_backend.launchers.external import ExternalLauncher
from trainer_backend.launchers.launcher import LEARNER, LOCAL, Launcher


@asynccontextmanager
async def launcher_of(
    cluster: ClusterTable | None, learner_url: str, run_id: str, say: Callable[[str], None]
) -> AsyncIterator[Launcher]:
    """The launcher that the job names, until the context is left.

    Args:
        learner_url: learner.url.
        run_id: the name of the run's places.
        say: is given a line where a place is waited for.

    Raises:
        JobError: there is no Ray, or it is of another version.
        NotPlaced: Ray starts no actor.
    """
    if cluster is None or cluster.launcher == "local":
        yield LOCAL
    elif cluster.launcher == "external":
        yield ExternalLauncher({LEARNER: learner_url})
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
