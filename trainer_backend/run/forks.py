"""Plans forks: rollouts for training that start at decisions of finished rollouts (docs/route.md, stop 3)."""

from collections.abc import Sequence

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.moments import Wanted, replay_all
from trainer_backend.collect.plan import Planner
from trainer_backend.credit.credit import Measured
from trainer_backend.run.run import Run

# A rollout, and its turns at which continuations begin.
Forked = tuple[Rollout, tuple[int, ...]]


async def plan_forks(
    run: Run, planner: Planner, parents: Sequence[Rollout], measured: Measured
) -> list[RolloutRequest]:
    """Plan rollouts that start at decisions of the actor's `parents`, chosen by the job's fork rule.

    If the rule reads what a parent sampled, it may choose a decision because of random events after it. So
    that these events are not repeated, the continuations then draw new random numbers if the environment can.

    Raises:
        TaskAppError: a replayed episode differs from the stored one.
    """
    rule, apps = planner.fork_rule, run.dispatcher.task_apps
    chosen = choose_forks(run, planner, parents, measured)
    if rule is None or not chosen:
        return []
    is_fresh = rule.reads_samples and run.reseedable
    snapshots = {parent.rollout_id: _taken(parent, turns) for parent, turns in chosen}
    wanted = [
        Wanted(parent, [turn - 1 for turn in turns])
        for parent, turns in chosen
        if len(snapshots[parent.rollout_id]) < len(turns)
    ]
    lost = 0
    for item, found in zip(wanted, await replay_all(apps, planner, wanted), strict=True):
        snapshots[item.rollout.rollout_id] = found or {}
        lost += found is None
    if lost:
        run.reporter.say(f"no task app can be reached to replay {lost} episodes; nothing plays on from them")
    return [
        request
        for parent, _ in chosen
        for request in planner.forks(parent, snapshots[parent.rollout_id], fresh_draws=is_fresh)
    ]


def _taken(parent: Rollout, turns: Sequence[int]) -> dict[int, str]:
    """Return the snapshots that were taken at these turns during play, by the number of earlier decisions."""
    episode = parent.trajectory
    assert episode is not None, "it finished"
    steps = [episode.steps[turn - 1] for turn in turns]
    return {step.turn - 1: step.snapshot for step in steps if step.snapshot is not None}


def choose_forks(run: Run, planner: Planner, parents: Sequence[Rollout], measured: Measured) -> list[Forked]:
    rule, credit = planner.fork_rule, run.credit
    reads_values = rule is not None and rule.needs_values
    chosen = [
        (parent, planner.fork_turns(parent, credit.td_errors(parent, measured) if reads_values else ()))
        for parent in credit.policies.by_actor(parents)
    ]
    return [(parent, turns) for parent, turns in chosen if turns]
