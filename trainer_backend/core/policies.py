"""Names of policies: the one that is trained, and the fixed ones that may sample beside it. Pure.

A server knows a policy as `{job}/{policy}`, and so do requests, trajectories and what is stored of them.
"""

ACTOR = "actor"
# What a lone [rollout_only] is called that gives no name.
FIXED = "fixed"


def name_model(job_name: str, policy: str) -> str:
    """The name of a job's policy at a server: `crafter/actor`."""
    return f"{job_name}/{policy}"


def parse_policy(model: str | None) -> str:
    """The policy that a trajectory's `model` names by its last part; the actor where it names none."""
    _, slash, policy = (model or "").rpartition("/")
    return policy if slash and policy else ACTOR


def name_player(model: str | None, policy_name: str) -> str:
    """The player's name for a person: the last part of its model, or else the name of the policy."""
    return (model or "").rpartition("/")[2] or policy_name


def policy_in(job_name: str, model: str | None) -> str:
    """As `parse_policy`, where `model` may be any server's name for a model.

    `Qwen/Qwen3-0.6B` names no policy of a job `crafter`, so what it sampled is the actor's.
    """
    return parse_policy(model) if (model or "").startswith(f"{job_name}/") else ACTOR
