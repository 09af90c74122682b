"""A user that is simulated by a language model behind an OpenAI-compatible server."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, SecretStr

from shared_schemas.messages import Message
from shared_schemas.trajectory import TokenLimit
from task_app.errors import InteractionFailed, InvalidRequest
from task_app.interactions.gsm8k import compute_score, last_answer, read_truth
from task_app.plugins import POLICIES, PolicyContext, validate_config
from task_app.policies.openai_config import OpenAIConfig, chat_completions_url
from task_app.protocols import AgentPolicy, BaseInteraction, PolicyObservation
from task_app.settings import Settings, VariableName

_INSTRUCTIONS = (
    "You are the user in a conversation with an assistant. Write the user's next message, and nothing else. "
    "When the assistant has done what you wanted, or cannot, end your message with {end_marker}."
)
_SPEAKERS = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


class UserSimulatorConfig(OpenAIConfig):
    """The config of a simulated user: all keys of the policy `openai`, and further keys for the user."""

    max_tokens: TokenLimit = 256
    ask_token_ids: Literal[False] = False
    api_key_env: VariableName | None = Field(
        default=None, description="environment variable that holds the server's key"
    )
    instructions: str = Field(
        default=_INSTRUCTIONS,
        min_length=1,
        max_length=100_000,
        description="the system message; {query} is replaced by query of the row's interaction_kwargs",
    )
    end_marker: str = Field(
        default="[END]", min_length=1, max_length=100, description="a message that holds it is the last one"
    )
    score: Literal["none", "ended", "gsm8k"] = Field(
        default="none",
        description="none; 1 for the answer after which the user ended; gsm8k: by the row's ground_truth",
    )


class UserSimulatorInteraction(BaseInteraction):
    """Lets a language model answer as the user.

    This language model gets the whole conversation as one message, because its chat template may require that
    a conversation begins with the user. Allowed hosts and retries are the same as for the policy `openai`.
    The server's API key is read from the environment variable that `api_key_env` names.
    """

    never_blocks = True

    @staticmethod
    def ground_truth_is_number(config: Mapping[str, Any]) -> bool:
        return config.get("score") == "gsm8k"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = validate_config(UserSimulatorConfig, config)
        self._user: AgentPolicy | None = None
        self._instructions = ""
        self._score = 0.0

    def check(self, settings: Settings) -> None:
        """Raise HostNotAllowed if the server may not be called, or InvalidRequest if its key is missing."""
        chat_completions_url(self._settings.inference_url, allowed_hosts=settings.inference_hosts)
        self._read_key()

    def connect(self, context: PolicyContext) -> None:
        """Create the client of the user's language model from the parts of the service in `context`.

        The client does not get the rollout's id, because its calls are not decisions of the rollout.
        """
        own = OpenAIConfig(**{name: getattr(self._settings, name) for name in OpenAIConfig.model_fields})
        context = replace(context, rollout_id=None, inference_key=self._read_key())
        self._user = POLICIES["openai"].build(own, context)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        if self._settings.score == "gsm8k":
            if kwargs.get("ground_truth") is None:
                raise ValueError("score is 'gsm8k', and the row gives no ground_truth")
            read_truth(kwargs["ground_truth"])
        self._instructions = _fill_instructions(self._settings, kwargs)
        return await super().start_interaction(instance_id)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        assert self._user is not None, "connect comes first"
        # Leave out the system message, which is for the assistant.
        lines = [
            f"{_SPEAKERS[message['role']]}: {message['content']}"
            for message in messages
            if message["role"] in _SPEAKERS and message["content"]
        ]
        prompt = (
            Message(role="system", content=self._instructions),
            Message(role="user", content="\n\n".join([*lines, "The user's next message:"])),
        )
        action, *_ = await self._user.get_action(PolicyObservation(prompt, {}), [])
        text = action.get("content") or ""
        has_ended = self._settings.end_marker in text
        score = float(has_ended) if self._settings.score == "ended" else None
        if self._settings.score == "gsm8k":
            score = compute_score(last_answer(messages), str(kwargs.get("ground_truth")))
        self._score = score or 0.0
        return has_ended, text.replace(self._settings.end_marker, "").strip(), score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return self._score

    def _read_key(self) -> SecretStr | None:
        name = self._settings.api_key_env
        if name is None:
            return None
        if not os.environ.get(name):
            raise InvalidRequest(f"config.api_key_env names {name!r}, which is not set", where="api_key_env")
        return SecretStr(os.environ[name])


def _fill_instructions(settings: UserSimulatorConfig, kwargs: Mapping[str, Any]) -> str:
    """Replace each `{name}` in the instructions by the row's value.

    Raises:
        InteractionFailed: the row has no value with this name.
    """
    values = {**kwargs, "end_marker": settings.end_marker}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise InteractionFailed(
                f"instructions name {match[0]}, which the row's interaction_kwargs do not give; they give "
                f"{', '.join(sorted(values))}"
            )
        return str(values[match[1]])

    return re.sub(r"\{(\w+)\}", value, settings.instructions)
