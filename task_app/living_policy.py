"""A living policy session as an `AgentPolicy`, for /policy/step and whole rollouts alike."""

from typing import Any

from pydantic import SecretStr

from task_app.errors import InferenceKeyNeeded, InvalidRequest
from task_app.protocols import RestorablePolicy, RetryingPolicy, policy_name
from task_app.services import Services
from task_app.sessions import PolicySession
from task_app.snapshots.sessions import policy_session, take_policy


class SessionPolicy:
    """What it decides is counted, and written down. The caller holds the session's lock."""

    def __init__(self, session: PolicySession) -> None:
        self._session = session
        self.name = policy_name(session.policy)

    @property
    def pending_failure(self) -> str | None:
        """As in protocols.RetryingPolicy."""
        policy = self._session.policy
        return policy.pending_failure if isinstance(policy, RetryingPolicy) else None

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        journal = self._session.journal
        if journal is not None:
            journal.ready(self._session)
        answer = await self._session.policy.get_action(observation, available_tools_specs)
        self._session.turn += 1
        if journal is not None:
            journal.decided(self._session)
        return answer


def living_policy(
    services: Services, session: PolicySession, *, inference_key: SecretStr | None, where: str
) -> SessionPolicy:
    """The session, ready to decide: with the `inference_key` of this request where it brings another one.

    Args:
        services: what the policy was made with.
        session: held by the caller.
        inference_key: from now on; None keeps the one of before.
        where: body path of the key.

    Raises:
        InferenceKeyNeeded: the key went with the process before, and the request brings none.
        InvalidRequest: the policy cannot take another one.
    """
    if inference_key is not None and inference_key != session.spec.inference_key:
        _give_key(services, session, inference_key, where=where)
    elif session.key_lost:
        raise InferenceKeyNeeded(
            "this policy's inference_key went with the process that was restarted",
            where=where,
            hint=f"send {where} with this request",
        )
    return SessionPolicy(session)


def _give_key(services: Services, session: PolicySession, inference_key: SecretStr, *, where: str) -> None:
    """Build the policy anew around the key, in the state that it is in."""
    if not isinstance(session.policy, RestorablePolicy):
        raise InvalidRequest(
            f"policy {policy_name(session.policy)!r} cannot take another inference_key: "
            "it has no snapshot() and restore()",
            where=where,
            hint="make another policy with the key",
        )
    facts = take_policy(session, where=where)
    context = services.policy_context(inference_key=inference_key)
    again = policy_session(facts, services.boards, context)
    session.policy, session.spec, session.key_lost = again.policy, again.spec, False
