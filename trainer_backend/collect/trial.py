"""Do the task apps take what the job configures? Asked before anything is played.

Each task app makes the job's environment and a policy of every stage, and lets go of them again; reward
functions and interactions are only looked for. A misspelt name or config is told in the first second and by
its TOML key, not after the minutes of a warm-up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shared_schemas.base import did_you_mean
from shared_schemas.problem import Problem
from shared_schemas.rollouts import PolicySpec
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.client import Created, TaskAppClient
from trainer_backend.collect.plan import Planner, stored_state_keys
from trainer_backend.collect.sources import interaction_names, row_of
from trainer_backend.collect.wire import Refused, TaskAppLost
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import JobError
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.rollout_table import SET_BY_ROWS, SET_BY_THE_JOB, MultiTurnTable, RolloutTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.plugins import estimator

_HOST_NOT_ALLOWED = "inference_host_not_allowed"
_SEED_KEY = {"seed": SET_BY_THE_JOB["seed"]}


@dataclass(frozen=True, slots=True)
class _StagePolicy:
    """The policy of a stage, as its first request names it, and the TOML keys that it is made of.

    Attributes:
        name_key, config_key: where the job names and configures it.
        given: what stands under config_key.
        derived: what the job adds to that, and from which key.
    """

    policy: PolicySpec
    name_key: str
    config_key: str
    given: Mapping[str, Any]
    derived: Mapping[str, str]

    def key_of(self, problem: Problem) -> str:
        """The TOML key that a task app's complaint about this policy is about."""
        place, _, path = (problem.where or "").partition(".")
        if place != "config":
            return self.name_key
        if problem.code == _HOST_NOT_ALLOWED:
            path = "inference_url"
        first = path.partition(".")[0]
        if first in self.derived and first not in self.given:
            return f"{self.derived[first]}, sent to {self.name_key} {self.policy.policy_name!r} as {first!r}"
        return f"{self.config_key}.{path}" if path else self.config_key


async def try_job(planner: Planner, apps: TaskApps, *, from_scratch: bool) -> None:
    """Have every task app that answers make what the job will ask for.

    Args:
        planner: with the address that the gateway will have; nobody is asked there.
        from_scratch: there is no checkpoint to go on from, so what comes before RL is played too.
    """
    policies = _policies(planner, from_scratch=from_scratch)
    first = planner.first_training()
    world = {"env_name": first.env.env_name, "config": first.env.config, "seed": first.start.seed}
    asked: frozenset[str | None] = frozenset()
    if planner.data is not None and planner.job.data is not None:
        asked = interaction_names(planner.job.data, planner.data)
    largest = planner.largest()
    unpaid: str | None = None
    environment_key = partial(_environment_key, row_of(first.group_id))
    for app in apps.members:
        if app.lost is not None:
            continue  # not there yet; it may come
        try:
            app.client.refuse_too_large(largest)
            made = await _try(
                app.client, "env", world, environment_key, job=planner.job, answered=bool(asked)
            )
            unpaid = unpaid or _unpaid(planner.job, made, answered=bool(asked))
            await _refuse_unknown_reward(app.client, first.reward_function)
            await _refuse_unknown_interactions(app.client, asked)
            for stage in policies:
                body = stage.policy.model_dump(mode="json", include={"policy_name", "config"})
                await _try(app.client, "policy", body, stage.key_of)
        except TaskAppLost as error:
            app.lost = str(error)
            apps.tell(f"task app lost: {error}")
    apps.refuse_if_none_answers()
    if unpaid is not None:
        apps.tell(unpaid)


def _unpaid(job: JobConfig, made: Created, *, answered: bool) -> str | None:
    """A warning where nothing but a penalty can ever be earned: such a job runs, and learns nothing else."""
    scored = answered or job.rollout.reward_function is not None or job.algorithm.episode_score == "outcome"
    if scored or made.observation.achievements_counts or not job.training.step_rewards.emits_decision_rewards:
        return None
    return (
        f"training.step_rewards_mode = 'decision_stepwise' pays nothing in {job.rollout.env_name!r}: it has "
        "no achievements, and no interaction or reward function scores a decision, so every r_t is 0 but for "
        'penalties; "env_sparse" pays what the environment pays, "off" its outcome'
    )


def _policies(planner: Planner, *, from_scratch: bool) -> list[_StagePolicy]:
    job = planner.job
    trained = ("rollout.policy_name", "rollout.policy_config", job.rollout.policy_config)
    own = {} if job.evaluation.temperature is None else {"temperature": "evaluation.temperature"}
    found = [
        _StagePolicy(planner.sampled_by(ACTOR, "train", 1, 0, 0), *trained, SET_BY_THE_JOB),
        _StagePolicy(planner.evaluation("0", most=1)[0].policy, *trained, {**SET_BY_THE_JOB, **own}),
        *(
            _StagePolicy(planner.sampled_by(table.name, "train", 1, 0, 0), *trained, _keys_of(planner, table))
            for table in job.fixed_policies
        ),
    ]
    if not from_scratch:
        return found
    if job.warmup is not None:
        teacher = ("warmup.policy_name", "warmup.policy_config", job.warmup.policy_config)
        found.append(_StagePolicy(planner.warmup(most=1)[0].policy, *teacher, _SEED_KEY))
    elif job.model.preset is not None:
        key = "model.preset without [warmup], whose tokenizer is trained on random play"
        found.append(_StagePolicy(planner.prompts(1)[0].policy, key, key, {}, _SEED_KEY))
    return found


def _keys_of(planner: Planner, table: RolloutOnlyTable) -> dict[str, str]:
    """What a fixed policy is told by the job, by the key that it inherits or that its own table gives."""
    own = [key for key in ("temperature", "top_p", "top_k") if getattr(table, key) is not None]
    return {
        **SET_BY_THE_JOB,
        **{key: f"[rollout_only] {table.name!r}" for key in planner.fixed[table.name].asks},
        **{key: f"rollout_only.{key} of {table.name!r}" for key in own},
    }


async def _refuse_unknown_reward(client: TaskAppClient, name: str | None) -> None:
    if name is None:
        return
    known = (await client.about()).capabilities.reward_functions
    if name not in known:
        told = f"unknown reward function {name!r}{did_you_mean(name, known) if known else '; it has none'}"
        raise JobError(
            f"{told} (says the task app at {client.url})",
            where="rollout.reward_function",
            hint="A file of the operator has it: services.task_plugins, or turnwise task-app --plugins FILE.",
        )


async def _refuse_unknown_interactions(client: TaskAppClient, asked: frozenset[str | None]) -> None:
    """Refuse unknown interactions of any row, since the row with a misspelt one may come last in an epoch."""
    if not asked:
        return
    known = (await client.about()).capabilities.interactions
    for name in sorted(asked - set(known) - {None}, key=str):
        told = f"unknown interaction {name!r}{did_you_mean(str(name), known) if known else '; it has none'}"
        raise _no_interaction(f"{told} (says the task app at {client.url})")
    if None in asked and len(known) != 1:
        told = f"some rows name no interaction, and the task app at {client.url} has {len(known)}"
        raise _no_interaction(f"{told}{': ' * bool(known)}{', '.join(known)}")


def _no_interaction(told: str) -> JobError:
    return JobError(
        told,
        where="data.interaction, or interaction_kwargs of a row",
        hint="A file of the operator has them: multi_turn.interaction_config_path, or turnwise task-app "
        "--interactions.",
    )


def _never_asked(env_name: str) -> JobError:
    return JobError(
        f"nobody would ask the interaction in {env_name!r}, where only tool calls count",
        where="data.interaction, or interaction_kwargs of a row",
        hint="Leave it out: the environment scores the episode itself; 'dialogue' is answered in words.",
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
    key_of: Callable[[Problem], str],
    *,
    job: JobConfig | None = None,
    answered: bool = False,
) -> Created:
    """Make it and let go of it; an environment is also looked at for what the `job` does with it: whether
    an interaction is to answer in it."""
    try:
        created = await client.create(kind, body)
    except Refused as refused:
        raise _told(refused, client, where=key_of(refused.problem_found)) from refused
    branches = job is not None and estimator(job.algorithm.advantage).needs_branches
    try:
        if job is not None and created.info.conversation:
            _refuse_conversation(job.rollout.env_name, job.multi_turn, job.algorithm)
            if answered and not created.info.takes_answers:
                raise _never_asked(job.rollout.env_name)
        if job is not None:
            _refuse_unknown_state_keys(job.algorithm, job.rollout, created, client)
        if branches:
            await client.snapshot(created.id)
    except Refused as refused:
        raise _told(refused, client, where="algorithm.advantage") from refused
    finally:
        await client.terminate(kind, created.id)
    return created


def _refuse_unknown_state_keys(
    algorithm: AlgorithmTable, rollout: RolloutTable, made: Created, client: TaskAppClient
) -> None:
    known = made.info.state_keys
    for name in stored_state_keys(algorithm, rollout):
        if name not in known:
            listed = name in rollout.state_keys
            raise JobError(
                f"{rollout.env_name!r} has no state key {name!r}{did_you_mean(name, known)} "
                f"(says the task app at {client.url})",
                where="rollout.state_keys" if listed else "algorithm.state_hashing_function",
            )


def _refuse_conversation(name: str, multi_turn: MultiTurnTable, algorithm: AlgorithmTable) -> None:
    if not multi_turn.enable:
        raise JobError(
            f"it is false, and the environment {name!r} is a conversation",
            where="multi_turn.enable",
            hint="With true, the other keys of [multi_turn] say what bounds it.",
        )
    if estimator(algorithm.advantage).needs_branches:
        raise JobError(
            f"{algorithm.advantage!r} plays on from snapshots, and {name!r} is a conversation, which no "
            "snapshot holds",
            where="algorithm.advantage",
        )


def _told(refused: Refused, client: TaskAppClient, *, where: str) -> JobError:
    """What a task app has against a job, by the key that it is about."""
    problem = refused.problem_found
    sentence = problem.detail.removeprefix(f"{problem.where}: ")
    return JobError(f"{sentence} (says the task app at {client.url})", where=where, hint=problem.hint)
