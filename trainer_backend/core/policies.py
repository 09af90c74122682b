"""Names of a job's policies: the actor, which is trained, and fixed policies, which only sample. Pure.

In servers, requests and trajectories, the model name of a policy is `{job}/{policy}`.
"""

ACTOR = "actor"
# Name of the fixed policy if the job has a single one and gives it no name in [rollout_only].
FIXED = "fixed"


def name_model(job_name: str, policy: str) -> str:
    """Return the model name by which servers know a job's policy, such as `crafter/actor`."""
    return f"{job_name}/{policy}"


def parse_policy(model: str | None) -> str:
    """Return the policy, the text after the last slash of a model name. Without a slash, return the actor."""
    _, slash, policy = (model or "").rpartition("/")
    return policy if slash and policy else ACTOR


def name_player(model: str | None, policy_name: str) -> str:
    """Return a player's display name: the text after the last slash of `model`, or else `policy_name`."""
    return (model or "").rpartition("/")[2] or policy_name


def policy_in(job_name: str, model: str | None) -> str:
    """Return the policy that `model` names if it begins with the job's name; otherwise return the actor.

    For example, `Qwen/Qwen3-0.6B` does not name a policy of a job `crafter`, so the result is the actor.
    """
    return parse_policy(model) if (model or "").startswith(f"{job_name}/") else ACTOR
