"""A run directory with figures that can be worked by hand."""

import json

from shared_schemas.messages import Message
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import ObservationData, StepData, StepInfo, StopReason, Trajectory
from trainer_backend.job.load import dump_job
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import Credit, write_rollouts

NAMES = ("collect_wood", "eat_cow", "place_table")
PROMPT = "<script>alert('saw')</script>"


def rollout(seed, unlocked_by_decision, *, group="g0", sibling=0):
    """A finished episode; each item names what that decision unlocked."""
    counts, steps = dict.fromkeys(NAMES, 0), []
    for turn, names in enumerate(unlocked_by_decision, start=1):
        after = {**counts, **dict.fromkeys(names, 1)}
        steps.append(
            StepData(
                turn=turn,
                observation_data=ObservationData(
                    messages=(Message(role="user", content=PROMPT),), achievements_counts=counts
                ),
                next_observation=ObservationData(achievements_counts=after),
                action_taken={"type": "tool_call"},
                env_rewards=(float(bool(names)),),
                step_info=StepInfo(executed_actions=("do", "noop")),
            )
        )
        counts = after
    unique = sum(count > 0 for count in counts.values())
    return Rollout(
        rollout_id=f"r/{group}/{seed}/{sibling}",
        run_id="r",
        iteration=0,
        group_id=group,
        sibling=sibling,
        attempt=0,
        instance_id="i",
        status="finished",
        trajectory=Trajectory(
            env_name="crafter",
            policy_name="openai",
            seed=seed,
            steps=tuple(steps),
            outcome_reward=float(unique),
            outcome_definition="unique achievements",
            achievements_counts=counts,
            env_steps=2 * len(steps),
            terminated=False,
            truncated=True,
            stop_reason=StopReason.MAX_DECISIONS,
            wall_s=0.1,
        ),
    )


WOOD, COW, TABLE = (("collect_wood",), ("eat_cow",), ("place_table",))
FIRST = (rollout(10, [WOOD, ()]), rollout(11, [(), ()]))  # 1 and 0 unique achievements
LAST = (rollout(10, [WOOD, COW, TABLE]), rollout(11, [(), COW]))  # 3 and 1


def evaluation_row(iteration, rollouts, low, high):
    unique = [item.trajectory.outcome_reward for item in rollouts]
    rates = {
        name: sum(item.trajectory.achievements_counts[name] for item in rollouts) / len(rollouts)
        for name in NAMES
    }
    return {
        "kind": "evaluation",
        "iteration": iteration,
        "eval/episodes": len(rollouts),
        "eval/unique_achievements": sum(unique) / len(unique),
        "eval/unique_achievements_low": low,
        "eval/unique_achievements_high": high,
        "eval/outcome_reward": sum(unique) / len(unique),
        "eval/outcome_reward_low": low,
        "eval/outcome_reward_high": high,
        "eval/outcome_definition": "unique achievements: how many",
        "eval/success_rates": rates,
        "eval/crafter_score": 12.5,
        "eval/progress": 100 * sum(unique) / len(unique) / len(NAMES),
        "eval/progress_low": None if low is None else 100 * low / len(NAMES),
        "eval/progress_high": None if high is None else 100 * high / len(NAMES),
        "eval/env_reward": 1.5,
        "eval/decisions": 2.5,
        "eval/invalid_frac": 0.25,
        "rollout/finished": 2.0,
        "rollout/failed": 0.0,
        "time/evaluate_s": 10.0,
    }


LOST = "the server at <b> does not answer"


def iteration_row(iteration, unique):
    return {
        "kind": "iteration",
        "iteration": iteration,
        "episode/outcome_reward": unique,
        "episode/outcome_definition": "unique achievements: how many",
        "episode/unique_achievements": unique,
        "decision/unique_by_turn": [unique, 0.0],
        "decision/nonzero_frac": 0.5,
        "reward/mean": unique,
        "decision/batch_nonzero": float(iteration > 1),
        "loss/entropy": 1.5,
        "loss/approx_kl": 0.01,
        "loss/clip_low_share": 0.1,
        "loss/clip_high_share": 0.2,
        "optim/grad_norm": 0.4,
        "rollout/finished": 4.0,
        "rollout/failed": 1.0,
        "rollout/failure/inference_unavailable": 2.0,
        "rollout/lost_causes": [[1, LOST]],
        "stop/max_decisions": 1.0,
        "time/collect_s": 20.0,
        "time/credit_s": 1.0,
        "time/update_s": 5.0,
        "time/publish_s": 0.0,
    }


def teacher_row():
    """The episodes that the warm-up imitates, as its first row tells them."""
    row = {**evaluation_row(0, LAST, 1.0, 3.0), "kind": "teacher", "time/collect_s": 7.0}
    del row["time/evaluate_s"]
    return row


def empty_run(job, path):
    """A run that has only begun."""
    path.mkdir(parents=True)
    (path / "job.toml").write_text(dump_job(job))
    (path / "run.json").write_text(json.dumps({"run_id": "r", "format": 1}))
    return RunDirectory(path, "r")


def small_run(job, path):
    """Two iterations, and evaluations before and after them."""
    run = empty_run(job, path)
    run.append_metrics(evaluation_row(0, FIRST, None, None))
    for iteration in (1, 2):
        run.append_metrics(iteration_row(iteration, float(iteration)))
        episodes = [rollout(1, [WOOD, ()]), rollout(2, [COW], group="g1")]
        credits = [Credit([1.0, 0.5 * iteration], [0.0, 0.0]), Credit([3.0], [0.0])]
        write_rollouts(run.rollouts_file(f"iteration_{iteration}"), episodes, credits)
    run.append_metrics(evaluation_row(2, LAST, 1.0, 3.0))
    write_rollouts(run.rollouts_file("evaluation_0"), FIRST)
    write_rollouts(run.rollouts_file("evaluation_2"), LAST)
    return run
