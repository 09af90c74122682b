"""From a rollout request to the worker that runs it; whatever is wrong with a request is found here."""

from shared_schemas.rollouts import RolloutRequest
from task_app.episode import RLRolloutWorker
from task_app.plugins import PlugBoards, PolicyContext
from task_app.switches import agreed_step_rewards, take_step_rewards


def build_worker(
    request: RolloutRequest, boards: PlugBoards, context: PolicyContext, *, where: str
) -> RLRolloutWorker:
    """Build environment, policy and worker; no world is made and nobody is asked yet.

    Args:
        request: what to run.
        boards: what it may name.
        context: what its policy gets beside its config.
        where: body path of the request, with a dot at its end.

    Raises:
        InvalidRequest, UnknownName, HostNotAllowed: with the body path of what is wrong.
    """
    env_config, found = take_step_rewards(request.env.config, where=where + "env.config")
    policy_config, of_policy = take_step_rewards(request.policy.config, where=where + "policy.config")
    found |= of_policy
    if "step_rewards" in request.model_fields_set:
        found[where + "step_rewards"] = request.step_rewards
    return RLRolloutWorker(
        environment=boards.environment(request.env.env_name, env_config, where=where + "env."),
        agent_policy=boards.policy(
            request.policy.policy_name, policy_config, context, where=where + "policy."
        ),
        seed=request.start.seed,
        limits=request.limits,
        step_rewards=agreed_step_rewards(found),
    )
