"""Makes what a run, an evaluation or a check consists of, such as planner, task apps and gateways.

Each part receives only those tables of the job that it reads; `tests/house/test_imports.py` lists the few
modules that may use a whole `JobConfig`. Functions here import torch only where they need it, because the
orchestrator runs without torch.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr

from trainer_backend.collect.apps import TaskApps, Tell, log_sentence
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.endpoints import hosts_to_call
from trainer_backend.collect.plan import Inference, Planner, Players, inferences
from trainer_backend.collect.sources import Allocation, Rows, Source, Worlds
from trainer_backend.collect.task_apps import task_apps as open_task_apps
from trainer_backend.core.critic import OfEpisode
from trainer_backend.core.policies import ACTOR, name_model
from trainer_backend.credit.credit import CreditAssignment
from trainer_backend.credit.rewards import Policies, Rewards
from trainer_backend.data.dataset import DataSet, read_data
from trainer_backend.data.truths import number_interactions
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.parts import CreditedEpisode, Reporter
from trainer_backend.processes.gateways import ActorGateways, GatewayProcesses, gateway_listener
from trainer_backend.processes.launching import LEARNER, LOCAL, ExternalLauncher, Launcher
from trainer_backend.processes.learner_process import LearnerProcess
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.rundir.data_record import DataRecord, read_record
from trainer_backend.rundir.layout import RunDirectory

Result = TypeVar("Result")
# Placeholder for a gateway port that the job leaves open; no list of allowed hosts can contain it.
_ANY_PORT = 1


@asynccontextmanager
async def launcher(job: JobConfig, run_id: str, say: Callable[[str], None]) -> AsyncIterator[Launcher]:
    """Open the launcher that the job names, which starts the processes of the run.

    Ray's launcher calls `say` with a line of text while it waits for free machines.

    Raises:
        JobError: Ray is missing or has another version.
        NotPlaced: Ray did not start an actor in time.
    """
    cluster = job.cluster
    if cluster is None or cluster.launcher == "local":
        yield LOCAL
    elif cluster.launcher == "external":
        yield ExternalLauncher({LEARNER: job.learner.url})
    else:
        try:
            from trainer_backend.processes.ray import RayLauncher
        except ModuleNotFoundError as error:
            raise JobError("cluster.launcher = 'ray' needs `pip install 'turnwise[ray]'`") from error
        ray = RayLauncher(run_id, cluster.wait_s, say)
        await ray.open(cluster.ray_address)
        try:
            yield ray
        finally:
            await ray.close()


def data(job: JobConfig, *, by_position: bool = False) -> DataSet | None:
    """Read the rows that a job's [data] names.

    Return None if the job has no [data]. The environment of such a job makes worlds from seeds.

    Args:
        by_position: make missing ids from the positions of rows, as old runs did; see `read_split`.

    Raises:
        JobError: the job names a file of interactions (simulated users), but no row uses an interaction.
    """
    found, interactions, asked = None, job.multi_turn.interaction_config_path, False
    if job.data is not None:
        found = read_data(
            job.data,
            instances=job.evaluation.instances,
            numbers=number_interactions(interactions),
            has_reward=job.rollout.reward_function is not None,
            by_position=by_position,
        )
        rows = (*found.training, *found.evaluation)
        asked = job.data.interaction is not None or any(row.interaction is not None for row in rows)
    if interactions is not None and not asked:
        reason = "there is no [data] whose rows it answers"
        if found is not None:
            reason = "no row has interaction_kwargs"
        raise JobError(
            f"the run would ignore it: {reason}",
            where="multi_turn.interaction_config_path",
            hint="data.interaction names the interaction of rows that name none.",
        )
    return found


def data_of_run(job: JobConfig, run: RunDirectory) -> tuple[DataSet | None, DataRecord | None]:
    """Return a job's rows, with the ids by which `run` knows them, and the run's record of rows."""
    record = read_record(run)
    # This version writes the record before the first rollout. So a run with rollouts but without a record is
    # old, and its rows have their positions as ids.
    by_position = record.by_position if record is not None else run.has_played()
    return data(job, by_position=job.data is not None and by_position), record


def planner(
    job: JobConfig, run_id: str, actor: Inference | None = None, data: DataSet | None = None
) -> Planner:
    """Make the planner of rollouts. `actor` may be None only if no rollout needs a language model."""
    fixed, seed = job.fixed_policies, job.job.seed
    if (job.data is None) != (data is None):
        raise ValueError("a plan needs the rows of [data], where the job has that table, and there alone")
    source: Source = Worlds(seed, job.rollout.seeds, job.evaluation)
    if data is not None and job.data is not None:
        source = Rows(seed, job.data, data)
    servers = {} if actor is None else inferences(job.job.name, job.rollout, fixed, actor)
    return Planner(
        run_id,
        Players(job.rollout, job.multi_turn, job.evaluation, fixed, servers=servers, seed=seed),
        source,
        Allocation(job.rollout_allocation_schedule, fixed, seed),
        table=job.training,
        algorithm=job.algorithm,
        teacher=job.warmup,
        curriculum=job.curriculum,
    )


def trial_planner(job: JobConfig, run_id: str, data: DataSet | None = None) -> Planner:
    """Make the planner for trials of a job at a task app. Trials use no gateway, so no port need be known."""
    host, port = job.services.gateway_host, job.services.gateway_port or _ANY_PORT
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    model, table = name_model(job.job.name, ACTOR), job.inference
    gateway = Inference(url, model, SecretStr(""), table.max_model_len, table.asks)
    return planner(job, run_id, gateway, data)


def task_apps(
    job: JobConfig,
    log_file: Path,
    player: Inference | None = None,
    *,
    data: DataSet | None = None,
    tell: Tell = log_sentence,
) -> AbstractAsyncContextManager[TaskApps]:
    """Start the job's own task apps, or connect to those that it names by URL.

    Task apps that are started here may call the server of `player`, a remote model.
    """
    return open_task_apps(
        job.services,
        log_file,
        hosts_to_call(job.warmup, player),
        interactions=job.multi_turn.interaction_config_path,
        rows=None if data is None or job.data is None else Rows(job.job.seed, job.data, data),
        tell=tell,
    )


def dispatcher(job: JobConfig, apps: TaskApps) -> Dispatcher:
    most = job.rollout.max_concurrent_rollouts
    return Dispatcher(apps, timeout_s=job.services.iteration_timeout_s, max_running=most)


def policies(job: JobConfig) -> Policies:
    return Policies(job.job.name, job.fixed_policies, job.rollout.temperature)


def credit(job: JobConfig) -> CreditAssignment:
    rewards = Rewards(job.training, job.max_decisions)
    return CreditAssignment(job.algorithm, policies(job), rewards, job.training.skip_flat_groups)


@contextmanager
def gateways(
    job: JobConfig, fixed: FixedSetup, directory: RunDirectory, tell: Tell, launcher: Launcher = LOCAL
) -> Iterator[ActorGateways]:
    """Make the gateways of a run, and reserve their ports. With [cluster], each gateway is a child process.

    Each child process loads its own copies of the fixed policies. `tell` receives a line when an inference
    server of the actor is lost, and when this server is back.
    """
    broadcasts = job.weights_by_broadcast
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(gateway_listener(job.services, number))
            for number in range(job.services.gateways)
        ]
        if job.cluster is not None:
            yield GatewayProcesses(
                job.job.name, job.model, job.inference, fixed, listeners, directory, tell, launcher,
                has_adapters=job.lora is not None, by_broadcast=broadcasts,
            )  # fmt: skip
            return
        # This module imports torch.
        from trainer_backend.processes.policy_server import PolicyServer

        apart = job.weights_by_folder or broadcasts
        yield PolicyServer(
            job.job.name, listeners[0], fixed.share_threads(job.inference),
            directory=directory if apart else None, broadcasts=broadcasts, tell=tell,
        )  # fmt: skip


async def by_checkpoint(
    job: JobConfig, folder: Path, work: Callable[[Inference], Coroutine[Any, Any, Result]]
) -> Result:
    """Serve the model in a folder as the job's actor while `work` runs, and return the result of `work`."""
    # This module imports torch, which evaluations of remote or scripted policies do not need.
    from trainer_backend.processes.policy_server import FolderPolicy, PolicyServer

    with gateway_listener(job.services) as listener:
        server = PolicyServer(job.job.name, listener, job.inference)
        policy = await asyncio.to_thread(FolderPolicy, job.model, server, folder)
        with policy.serving() as inference:
            return await policy.while_serving(work(inference))


def learner_process(
    job: JobConfig, directory: RunDirectory, reporter: Reporter, launcher: Launcher = LOCAL
) -> LearnerProcess:
    """Make the handle of a learner in a process of its own. The process receives the whole job."""
    return LearnerProcess(
        dump_job(job),
        job.learner,
        directory,
        reporter,
        launcher,
        device=job.model.device,
        wait_s=0.0 if job.cluster is None else job.cluster.wait_s,
    )


def gradient_cosines(
    job: JobConfig,
    checkpoint: Path,
    directory: RunDirectory,
    episodes: Sequence[CreditedEpisode],
    advantages: Mapping[str, Sequence[OfEpisode]],
    *,
    reporter: Reporter,
) -> dict[tuple[str, str], float]:
    """Return the cosine between the policy gradients of each pair of estimators; see `learner.factory`.

    The cosine of estimators a and b is returned under both keys, (a, b) and (b, a). The gradients are
    computed on as many ranks as the job trains on. `advantages` maps each estimator to the advantages of each
    episode, in the order of `episodes`.
    """
    tell = partial(reporter.stage, "gradients")

    async def by_ranks() -> list[tuple[str, str, float]]:
        # Use another run id: with the original, the learner would take this call for a restart of the run.
        apart = replace(directory, run_id=f"{directory.run_id}.recredit")
        async with (
            launcher(job, apart.run_id, reporter.say) as found,
            learner_process(job, apart, reporter, found) as ranks,
        ):
            return await asyncio.to_thread(ranks.gradient_cosines, checkpoint, episodes, advantages, tell)

    if job.learner.ranks > 1:
        cosines = asyncio.run(by_ranks())
    else:
        from trainer_backend import learner_parts

        cosines = learner_parts.local_learners(job).gradient_cosines(checkpoint, episodes, advantages, tell)
    return {pair: cosine for a, b, cosine in cosines for pair in ((a, b), (b, a))}
