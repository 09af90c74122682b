"""From a rollout request to the worker that runs it; whatever is wrong with a request is found here."""

from shared_schemas.rollouts import EnvSpec, RolloutRequest
from shared_schemas.task_definition import TaskDefinitionModel
from task_app.episode import RLRolloutWorker
from task_app.errors import SnapshotRefused
from task_app.plugins import PlugBoards, PolicyContext
from task_app.snapshots.envelope import from_text
from task_app.snapshots.episodes import KeptMoments, refuse_unrestorable
from task_app.snapshots.sessions import EnvironmentSnapshot, episode_start, open_environment
from task_app.snapshots.starts import Worlds
from task_app.switches import agreed_step_rewards, take_step_rewards


def build_worker(
    request: RolloutRequest, boards: PlugBoards, context: PolicyContext, *, worlds: Worlds, where: str
) -> RLRolloutWorker:
    """Build environment, policy and worker; no world is made and nobody is asked yet.

    Args:
        request: what to run.
        boards: what it may name.
        context: what its policy gets beside its config.
        worlds: where siblings find the world that one of them made.
        where: body path of the request, with a dot at its end.

    Raises:
        InvalidRequest, UnknownName, HostNotAllowed, SnapshotRefused: with the body path of what is wrong.
    """
    env_config, found = take_step_rewards(request.env.config, where=where + "env.config")
    policy_config, of_policy = take_step_rewards(request.policy.config, where=where + "policy.config")
    found |= of_policy
    if "step_rewards" in request.model_fields_set:
        found[where + "step_rewards"] = request.step_rewards
    env = EnvSpec(env_name=request.env.env_name, config=env_config)
    if request.reward_function is not None:
        boards.reward_function(request.reward_function, where=where)
    environment = boards.environment(env.env_name, env.config, where=where + "env.")
    if request.start.snapshot is not None:
        taken = _taken(request.start.snapshot, env, boards, context, where=where + "start.snapshot")
        seed, start = taken.facts.seed, episode_start(taken, request.start, context.threads)
    else:
        assert request.start.seed is not None, "a start is one of the two"
        seed, start = request.start.seed, worlds.start(env, request.start.seed, context.threads)
    if request.snapshot_turns:
        refuse_unrestorable(environment, where=where + "snapshot_turns")
    switches = agreed_step_rewards(found)
    return RLRolloutWorker(
        task_definition=TaskDefinitionModel.of_request(request),
        environment=environment,
        agent_policy=boards.policy(
            request.policy.policy_name, policy_config, context, where=where + "policy."
        ),
        seed=seed,
        start=start,
        step_rewards=switches,
        state_keys=boards.state_keys(request.state_keys, env.env_name, where=where),
        keep=KeptMoments(
            frozenset(request.snapshot_turns),
            boards.resolved(env),
            seed,
            switches if found else None,
            at_most_bytes=context.settings.max_snapshot_bytes,
            timeout_s=request.limits.timeout_s,
            threads=context.threads,
        ),
        threads=context.threads,
    )


def _taken(
    text: str, env: EnvSpec, boards: PlugBoards, context: PolicyContext, *, where: str
) -> EnvironmentSnapshot:
    """The snapshot of a start, if an episode of this environment can go on from it."""
    try:
        data = from_text(text, where=where)
        taken = open_environment(data, at_most_bytes=context.settings.max_snapshot_bytes)
    except SnapshotRefused as exc:
        exc.where = where
        raise
    wanted, found = boards.resolved(env), taken.facts.env
    if found != wanted:
        raise SnapshotRefused(
            f"the snapshot is of {_told(found, wanted)}, the rollout is to play {_told(wanted, found)}",
            where=where,
            hint="give the env_name and config that the snapshot was taken with",
        )
    if taken.facts.over:
        raise SnapshotRefused("the episode in the snapshot has ended; no decision can follow", where=where)
    return taken


def _told(env: EnvSpec, other: EnvSpec) -> str:
    """Its name, and where the names are equal the settings in which it differs."""
    if env.env_name != other.env_name:
        return f"environment {env.env_name!r}"
    odd = {name: value for name, value in env.config.items() if other.config.get(name) != value}
    return f"{env.env_name!r} with {odd}"
