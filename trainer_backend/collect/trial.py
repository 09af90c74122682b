"""Checks before a run that the task apps can run the job.

Each task app creates the job's environment, takes one decision without tool calls in it, creates the policy
of every stage, and releases all of them. Names of reward functions and interactions are only compared with
the names that the task app lists. Thus a job with a wrong name, a wrong config or an environment that raises
ends at once, with an error that names the TOML key, and not after minutes of warm-up.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shared_schemas.base import did_you_mean
from shared_schemas.problem import Problem
from shared_schemas.rollouts import PolicySpec
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.client import Instance, InstanceInfo, TaskAppClient
from trainer_backend.collect.plan import Planner, Players, Slot
from trainer_backend.collect.sources import Rows, read_row_id
from trainer_backend.collect.wire import BackendFailed, PluginFailed, Refused, TaskAppLost
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.rollout_table import SAMPLING_KEYS, SET_BY_ROWS, SET_BY_THE_JOB
from trainer_backend.job.task_app_rules import TASK_APP_RULES, Played
from trainer_backend.plugins import estimator

_ROWS_ARE_PLAYED = (
    "rollout.env_name = 'dialogue' plays prompts, and 'documents' documents; worlds of seeds have no rows."
)
_HOST_NOT_ALLOWED = "inference_host_not_allowed"
_SEED_KEY = {"seed": SET_BY_THE_JOB["seed"]}


@dataclass(frozen=True, slots=True)
class _StagePolicy:
    """The policy of a stage's first request, and the TOML keys that set its name and config."""

    policy: PolicySpec
    name_key: str
    config_key: str
    config: Mapping[str, Any]
    """The value of the TOML key `config_key`."""
    job_keys: Mapping[str, str]
    """Names of further settings in the policy's config, and the TOML key that sets each of them."""

    def find_key(self, problem: Problem) -> str:
        """Return the TOML key that caused a problem which a task app reported for this policy."""
        place, _, path = (problem.where or "").partition(".")
        if place != "config":
            return self.name_key
        if problem.code == _HOST_NOT_ALLOWED:
            path = "inference_url"
        first = path.partition(".")[0]
        if first in self.job_keys and first not in self.config:
            return f"{self.job_keys[first]}, sent to {self.name_key} {self.policy.policy_name!r} as {first!r}"
        return f"{self.config_key}.{path}" if path else self.config_key


async def try_job(planner: Planner, apps: TaskApps, *, from_scratch: bool, preset: bool = False) -> None:
    """Let every task app that answers create the job's environment and policies, as a check.

    Advice on the job is reported through `apps.tell`.

    Args:
        planner: plans the requests. The gateway that they name is not called.
        from_scratch: whether the run has no checkpoint, so that it begins with a warm-up or with random play.
        preset: whether [model] names a preset. Without a warm-up, random play then trains its tokenizer.

    Raises:
        JobError: a task app refuses a part of the job, or a plug-in raised an error.
        TaskAppError: no task app answers, or a call hangs or fails for another reason.
    """
    policies = _policies(planner, from_scratch=from_scratch, preset=preset)
    first = planner.first_training()
    world = {"env_name": first.env.env_name, "config": first.env.config, "seed": first.start.seed}
    source = planner.source
    interactions = source.interactions() if isinstance(source, Rows) else frozenset()
    largest = planner.largest()
    warnings = list[str]()
    environment_key = partial(_environment_key, read_row_id(first.group_id))
    for app in apps.serving:  # task apps that do not answer yet are not checked
        try:
            app.refuse_too_large(largest)
            check = partial(_check, planner, app, warnings, has_interactions=bool(interactions))
            await _try(app, "env", world, environment_key, check=check)
            if isinstance(source, Rows) and interactions:
                await _refuse_interactions(app, source, interactions)
            for stage in policies:
                body = stage.policy.model_dump(mode="json", include={"policy_name", "config", "seed"})
                await _try(app, "policy", body, stage.find_key)
        except TaskAppLost as error:
            await _refuse_hanging(app, error)
            apps.lose(app, error)
    apps.refuse_if_none_answers()
    for warning in dict.fromkeys(warnings):
        apps.tell(warning)


async def describe_environment(planner: Planner, apps: TaskApps) -> tuple[TaskAppClient, InstanceInfo]:
    """Create the job's environment at a task app, and return the app and its description of the environment.

    Raises:
        TaskAppError: no task app answers, or the environment cannot be created.
    """
    apps.refuse_if_none_answers()
    client, first = apps.serving[0], planner.first_training()
    body = {"env_name": first.env.env_name, "config": first.env.config, "seed": first.start.seed}
    created = await client.create("env", body)
    await client.terminate("env", created.id)
    return client, created.info


async def _refuse_hanging(app: TaskAppClient, error: TaskAppLost) -> None:
    """Raise TaskAppError if `error` is a timeout although the task app answers other requests."""
    cause = error.__cause__
    if cause is None or not isinstance(cause.__cause__, TimeoutError):
        return
    try:
        await app.about(attempts=1)
    except TaskAppError:
        return
    raise TaskAppError(
        f"{error}, while the task app answers other requests: the call hangs",
        hint="The task app's log names it once it has run for its plugin_stuck_after_s.",
    ) from error


def _policies(planner: Planner, *, from_scratch: bool, preset: bool) -> list[_StagePolicy]:
    players, first = planner.players, Slot("train", 1, 0)
    actor = partial(
        _StagePolicy,
        name_key="rollout.policy_name",
        config_key="rollout.policy_config",
        config=players.rollout.policy_config,
    )
    own = {} if players.held_out.temperature is None else {"temperature": "evaluation.temperature"}
    policies = [
        actor(players.sampled_by(ACTOR, "", *first), job_keys=SET_BY_THE_JOB),
        actor(planner.evaluation("0", most=1)[0].policy, job_keys={**SET_BY_THE_JOB, **own}),
        *(
            actor(players.sampled_by(table.name, "", *first), job_keys=_find_fixed_keys(players, table))
            for table in players.fixed
        ),
    ]
    if not from_scratch:
        return policies
    if planner.teacher is not None:
        policies.append(
            _StagePolicy(
                planner.warmup(most=1)[0].policy,
                name_key="warmup.policy_name",
                config_key="warmup.policy_config",
                config=planner.teacher.policy_config,
                job_keys=_SEED_KEY,
            )
        )
    elif preset:
        key = "model.preset without [warmup], whose tokenizer is trained on random play"
        policies.append(
            _StagePolicy(
                planner.prompts(1)[0].policy, name_key=key, config_key=key, config={}, job_keys=_SEED_KEY
            )
        )
    return policies


def _find_fixed_keys(players: Players, table: RolloutOnlyTable) -> dict[str, str]:
    """Return a dict from the settings in a fixed policy's config to the TOML keys that set them."""
    own = [key for key in SAMPLING_KEYS if getattr(table, key, None) is not None]
    return {
        **SET_BY_THE_JOB,
        **{key: f"[rollout_only] {table.name!r}" for key in players.servers[table.name].asks},
        **{key: f"rollout_only.{key} of {table.name!r}" for key in own},
    }


async def _refuse_interactions(client: TaskAppClient, rows: Rows, names: frozenset[str | None]) -> None:
    """Refuse rows that cannot be played because of their interaction, before the run reaches them.

    Args:
        names: the interactions of all rows; None stands for an interaction without a name.

    Raises:
        JobError: the task app does not know one of `names`, or `names` contains None and the task app does
            not have exactly one interaction.
        DataError: an interaction needs a number as ground truth, and a row has none.
    """
    capabilities = (await client.about()).capabilities
    known = capabilities.interactions
    for name in sorted(names - set(known) - {None}, key=str):
        told = f"unknown interaction {name!r}{did_you_mean(str(name), known) if known else '; it has none'}"
        raise _no_interaction(f"{told} (says the task app at {client.url})")
    if None in names and len(known) != 1:
        told = f"some rows name no interaction, and the task app at {client.url} has {len(known)}"
        raise _no_interaction(f"{told}{': ' * bool(known)}{', '.join(known)}")
    numbers: set[str | None] = set(capabilities.number_interactions)
    if numbers.issuperset(known):
        numbers.add(None)
    rows.refuse_unmatchable(numbers)


def _no_interaction(message: str) -> JobError:
    return JobError(
        message,
        where="data.interaction, or interaction_kwargs of a row",
        hint="A file of the operator has them: multi_turn.interaction_config_path, or turnwise task-app "
        "--interactions.",
    )


def _environment_key(row_id: str | None, problem: Problem) -> str:
    place, dot, path = (problem.where or "").partition(".")
    if place == "config" and row_id is not None and path.partition(".")[0] in SET_BY_ROWS:
        return f"data.path, row {row_id!r}, sent to rollout.env_name as {path!r}"
    return f"rollout.env_config{dot}{path}" if place == "config" else "rollout.env_name"


async def _try(
    client: TaskAppClient,
    kind: Literal["env", "policy"],
    body: Mapping[str, Any],
    find_key: Callable[[Problem], str],
    *,
    check: Callable[[Instance], Awaitable[None]] | None = None,
) -> Instance:
    """Create an environment or policy at a task app, call `check` with it, and release it.

    Args:
        find_key: returns the TOML key that caused a problem reported by the task app.
    """
    try:
        instance = await client.create(kind, body)
        try:
            if check is not None:
                await check(instance)
        finally:
            await client.terminate(kind, instance.id)
    except BackendFailed as failure:
        failure.where = find_key(failure.finding)
        raise
    except (Refused, PluginFailed) as refusal:
        raise _job_error(refusal, client, where=find_key(refusal.finding)) from refusal
    return instance


async def _check(
    planner: Planner,
    client: TaskAppClient,
    warnings: list[str],
    instance: Instance,
    *,
    has_interactions: bool,
) -> None:
    """Raise JobError if the job cannot use this environment, and append advice to `warnings`."""
    rollout, info = planner.players.rollout, instance.info
    is_judged = rollout.reward_function is not None
    played = Played(
        rollout, planner.players.multi_turn, planner.algorithm, planner.table,
        conversation=info.conversation,
        takes_answers=info.takes_answers,
        rewards_decisions=bool(
            has_interactions or instance.observation.achievements_counts or info.rewards_calls
        ),
        state_keys=tuple(info.state_keys),
        has_interactions=has_interactions,
        has_curriculum=planner.curriculum is not None,
        restorable=info.restorable,
        reward_functions=tuple((await client.about()).capabilities.reward_functions) if is_judged else (),
    )  # fmt: skip
    found = [finding for rule in TASK_APP_RULES for finding in rule.findings(played)]
    if refusals := [finding for finding in found if finding.kind != "advice"]:
        lines = [f"{finding.sentence} (says the task app at {client.url})" for finding in refusals]
        others = [f"{other.keys[0]}: {line}" for other, line in zip(refusals[1:], lines[1:], strict=True)]
        raise JobError("\n".join([lines[0], *others]), where=refusals[0].keys[0])
    warnings.extend(finding.sentence for finding in found)
    places = {
        "algorithm.advantage": estimator(planner.algorithm.advantage).needs_branches,
        "curriculum.rule": planner.curriculum is not None,
        "algorithm.train_branches": planner.algorithm.train_branches,
    }
    for place in (place for place, needs_snapshots in places.items() if needs_snapshots):
        try:
            await client.snapshot(instance.id)
        except Refused as refusal:
            raise _job_error(refusal, client, where=place) from refusal
    try:
        await client.step_idly(instance.id)
    except TaskAppError as error:  # agents, for example, refuse a decision without tool calls
        if isinstance(error, PluginFailed | BackendFailed | TaskAppLost):
            raise


def _job_error(refusal: Refused | PluginFailed, client: TaskAppClient, *, where: str) -> JobError:
    """Convert a task app's refusal or a plug-in's failure to a JobError that names the TOML key `where`."""
    problem = refusal.finding
    sentence = problem.detail.removeprefix(f"{problem.where}: ")
    hint = problem.hint or (_ROWS_ARE_PLAYED if where.startswith("data.path") else None)
    return JobError(f"{sentence} (says the task app at {client.url})", where=where, hint=hint)
