"""Names of policies: the actor, which is trained, and fixed policies, which only sample. Pure.

Servers, requests and trajectories call a policy `{job}/{policy}`.
"""

ACTOR = "actor"
# Name of the only [rollout_only] policy if it has no name of its own.
FIXED = "fixed"


def name_model(job_name: str, policy: str) -> str:
    """Return the name of a job's policy at a server, such as `crafter/actor`."""
    return f"{job_name}/{policy}"


def parse_policy(model: str | None) -> str:
    """Return the policy in the last part of a trajectory's `model`; the actor if it has none."""
    _, slash, policy = (model or "").rpartition("/")
    return policy if slash and policy else ACTOR


def name_player(model: str | None, policy_name: str) -> str:
    """Return a player's display name: the last part of its model; without a model, the policy's name."""
    return (model or "").rpartition("/")[2] or policy_name


def policy_in(job_name: str, model: str | None) -> str:
    """Return the policy of a job that `model` names; the actor for any other model.

    For example `Qwen/Qwen3-0.6B` is not a policy of a job `crafter`.
    """
    return parse_policy(model) if (model or "").startswith(f"{job_name}/") else ACTOR
