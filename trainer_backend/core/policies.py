"""Names of policies: the one that is trained, and the fixed ones that may sample beside it. Pure.

A server knows a policy as `{job}/{policy}`, and so do requests, trajectories and what is stored of them.
"""

ACTOR = "actor"
# What a lone [rollout_only] is called that gives no name.
FIXED = "fixed"


def model_of(job_name: str, policy: str) -> str:
    """What a server calls a policy of a job: `crafter/actor`."""
    return f"{job_name}/{policy}"


def policy_of(model: str | None) -> str:
    """The policy that a trajectory's `model` names: its last part. What names no policy is the actor's."""
    _, slash, policy = (model or "").rpartition("/")
    return policy if slash and policy else ACTOR


def player_of(model: str | None, policy_name: str) -> str:
    """Whom a person calls the player, of whichever policy: the last part of its model, else its own name."""
    return (model or "").rpartition("/")[2] or policy_name


def policy_in(job_name: str, model: str | None) -> str:
    """The same for a reported policy, which may be any server's name for a model.

    `Qwen/Qwen3-0.6B` names no policy of a job `crafter`, so what it sampled is the actor's.
    """
    return policy_of(model) if (model or "").startswith(f"{job_name}/") else ACTOR
