"""Answer one chat completion: sample the choices of its request, and build the reply."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_backend.inference.actor import Extras, Generation, SampledToken
from trainer_backend.inference.answers import Answer, hash_message
from trainer_backend.inference.chat_request import ChatRequest
from trainer_backend.inference.conversations import Prompt, Turn
from trainer_backend.inference.reply import (
    REASONING,
    Choice,
    assistant_message,
    choice_body,
    logprob_entries,
    rollout_body,
    split_stop,
    usage_body,
)
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.inference.stop_strings import StopStrings, cut_before


@dataclass(frozen=True, slots=True)
class Completion:
    """A chat request with its rendered prompt. The methods sample the choices and build the reply.

    `rollout_id` is "" if the request belongs to no rollout.
    """

    completion_id: str
    created: int
    request: ChatRequest
    policy: ServedPolicy
    prompt: Prompt
    max_tokens: int
    rollout_id: str
    call_opening: str = ""
    """The beginning of a forced call, or "". The prompt ends with this text, so it is put before the sampled
    text when an answer is parsed."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the names of settings in the request that have no effect.

        They are the ignored keys, and `tool_choice` if it demands a call that the gateway could not force.
        """
        is_free = self.request.forces_call and not self.prompt.opening
        return (*(["tool_choice"] if is_free else []), *self.request.left_out)

    def generation(
        self, index: int, on_token: Callable[[SampledToken], None] | None = None
    ) -> Coroutine[Any, Any, Generation]:
        return self.policy.engine.generate(
            self.prompt.ids,
            self.request.sampling(max_tokens=self.max_tokens, choice=index),
            request_id=f"{self.completion_id}.{index}" if index else self.completion_id,
            extras=self._extras(on_token),
        )

    def choice(self, index: int, generation: Generation) -> Choice:
        """Build a choice. Its message is parsed from the text before the stop string or the stop token."""
        renderer = self.policy.renderer
        raw_text, stop_token = split_stop(generation, renderer)
        text = raw_text if generation.stop_string is None else cut_before(raw_text, self.request.stop)
        parsed = self.policy.tool_format.parse(self.call_opening + text, self.request.active_tools)
        return Choice(
            index=index,
            generation=generation,
            message=assistant_message(parsed, prompt_ids=self.prompt.ids, token_ids=generation.token_ids),
            raw_text=raw_text,
            stop_token=stop_token,
        )

    def turn(self, choice: Choice) -> Turn:
        """Join the prompt and this choice to the turn that the rollout's next prompt continues."""
        answer = Answer(
            index=len(self.request.messages),
            message_hash=hash_message(choice.message),
            raw_text=choice.raw_text,
            stop_text=choice.stop_token,
            opening=self.prompt.opening,
            reasoning=choice.message.get(REASONING, ""),
        )
        return Turn.of(self.prompt, answer, choice.generation.token_ids, self.policy.renderer)

    def frame(self, kind: str) -> dict[str, Any]:
        """Return the first fields of a reply. In a streamed reply, every chunk begins with these fields."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
        }

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self.frame("chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": choice.message,
                    "logprobs": self.logprobs_body(choice.generation.sampled()),
                    **self.exact_fields(choice),
                }
                for choice in choices
            ],
            "usage": usage_body(self.prompt.ids, [choice.generation for choice in choices]),
            **self.prompt_fields(),
        }

    def exact_fields(self, choice: Choice) -> dict[str, Any]:
        """Return the fields that say how a choice ended and list its tokens; see `shared_schemas.chat`."""
        body = choice_body(choice)
        return {**body, **rollout_body(choice, reused=self._reused)} if self.rollout_id else body

    def prompt_fields(self) -> dict[str, Any]:
        """Return the reply's fields about the prompt's ids, without ids that the caller already has.

        Return {} if the request neither asks for token ids nor belongs to a rollout.
        """
        if not (self.request.return_token_ids or self.rollout_id):
            return {}
        return {"prompt_ids_reused": self._reused, "prompt_token_ids": self.prompt.ids[self._reused :]}

    @property
    def _reused(self) -> int:
        """Return how many of the prompt's first ids the reply omits, because the caller already has them."""
        return 0 if self.request.return_token_ids else self.prompt.reused

    def logprobs_body(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {"content": logprob_entries(tokens, self.policy.renderer), "refusal": None}

    def _extras(self, on_token: Callable[[SampledToken], None] | None) -> Extras:
        request = self.request
        stop = StopStrings(self.policy.renderer.decode, request.stop) if request.stop else None
        return Extras(
            request.top_logprobs,
            stop,
            request.processed_logprobs,
            on_token,
            session=self.rollout_id,
            common_draws=request.common_draws,
        )


async def all_generations(completion: Completion) -> list[Generation]:
    """Sample all choices. If one choice fails or the caller disconnects, abort the others."""
    if completion.request.n == 1:
        return [await completion.generation(0)]
    tasks = [asyncio.ensure_future(completion.generation(i)) for i in range(completion.request.n)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
