"""Stop 3 of the route for continuations that are trained: finished episodes are forked and replayed."""

import asyncio
from collections.abc import Sequence
from itertools import count

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.moments import snapshots_at
from trainer_backend.collect.plan import Planner
from trainer_backend.collect.trial import describe_environment
from trainer_backend.collect.wire import first_of
from trainer_backend.credit.credit import Measured
from trainer_backend.run.run import Run

# Turns of a rollout at which others begin.
Forked = tuple[Rollout, tuple[int, ...]]


async def plan_forks(
    run: Run, planner: Planner, parents: Sequence[Rollout], measured: Measured
) -> list[RolloutRequest]:
    """Rollouts that play on from decisions of finished ones of the actor, as the job's rule chooses them.

    Where the rule reads samples, their world draws other numbers than their parent met, if it can: a decision
    that was chosen for its luck would else be lucky again.

    Raises:
        TaskAppError: an episode goes otherwise when it is replayed.
    """
    rule, apps = planner.fork_rule, run.dispatcher.task_apps
    chosen = choose_forks(run, planner, parents, measured)
    if rule is None or not chosen:
        return []
    is_fresh = rule.reads_samples and (await describe_environment(planner, apps))[1].reseedable
    replayed = await _replay(run, planner, chosen)
    if lost := len(chosen) - len(replayed):
        run.reporter.say(f"no task app can be reached to replay {lost} episodes; nothing plays on from them")
    return [
        request
        for parent, snapshots in replayed
        for request in planner.forks(parent, snapshots, fresh_draws=is_fresh)
    ]


def choose_forks(run: Run, planner: Planner, parents: Sequence[Rollout], measured: Measured) -> list[Forked]:
    """The decisions that are forked, by rollout; rollouts without any are left out."""
    rule, credit = planner.fork_rule, run.credit
    reads_values = rule is not None and rule.needs_values
    chosen = [
        (parent, planner.fork_turns(parent, credit.td_errors(parent, measured) if reads_values else ()))
        for parent in credit.policies.by_actor(parents)
    ]
    return [(parent, turns) for parent, turns in chosen if turns]


async def _replay(
    run: Run, planner: Planner, chosen: Sequence[Forked]
) -> list[tuple[Rollout, dict[int, str]]]:
    """Snapshots by the decisions before them. A task app replays one episode at a time: a lane for each."""
    apps, places = run.dispatcher.task_apps, count()
    found: dict[int, dict[int, str] | None] = {}

    async def replay_next(lane: int) -> None:
        while (place := next(places)) < len(chosen):
            parent, turns = chosen[place]
            done = [turn - 1 for turn in turns]
            found[place] = await snapshots_at(apps, planner, parent, done, first_app=lane)

    try:
        async with asyncio.TaskGroup() as group:
            for lane in range(max(1, len(apps.serving))):
                group.create_task(replay_next(lane))
    except BaseExceptionGroup as errors:
        raise first_of(errors) from errors
    pairs = [(parent, found[place]) for place, (parent, _) in enumerate(chosen)]
    return [(parent, snapshots) for parent, snapshots in pairs if snapshots is not None]
