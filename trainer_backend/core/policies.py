"""Names of policies: the actor, which is trained, and fixed policies, which may sample too. Pure.

Servers, requests and trajectories call a policy `{job}/{policy}`.
"""

ACTOR = "actor"
# Name of a lone [rollout_only] without a name of its own.
FIXED = "fixed"


def name_model(job_name: str, policy: str) -> str:
    """The name of a job's policy at a server: `crafter/actor`."""
    return f"{job_name}/{policy}"


def parse_policy(model: str | None) -> str:
    """The policy in the last part of a trajectory's `model`; the actor where there is none."""
    _, slash, policy = (model or "").rpartition("/")
    return policy if slash and policy else ACTOR


def name_player(model: str | None, policy_name: str) -> str:
    """A player's name for people: the last part of its model, or else the name of the policy."""
    return (model or "").rpartition("/")[2] or policy_name


def policy_in(job_name: str, model: str | None) -> str:
    """As `parse_policy`, where `model` may be any server's name for a model.

    `Qwen/Qwen3-0.6B` names no policy of a job `crafter`, so what it sampled is the actor's.
    """
    return parse_policy(model) if (model or "").startswith(f"{job_name}/") else ACTOR
