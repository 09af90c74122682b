"""Keeps a conversation: each decision adds the model's message, then tool results or the user's answer.

`Conversation` implements the states of 3-context-editing-tool-loop.md: its method `prompt` is the state
PENDING, and its method `carry_out` is PROCESSING_TOOLS and INTERACTING. The simulated user answers only a
message without a tool call (DESIGN.md 4.11, 4.12).
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import structlog

from shared_schemas.messages import Message
from shared_schemas.plain_text import encodable
from shared_schemas.rollouts import MultiTurn
from shared_schemas.trajectory import RewardPart, StepData, UserAnswer
from task_app.environment_calls import list_tools
from task_app.episode.actions import Action, Choice
from task_app.episode.context_tools import Budget, apply, context_specs
from task_app.episode.history import Change, History
from task_app.episode.prompts import DecisionEffect, Execute, Prompt, Prompts, open_with
from task_app.errors import CriticalError, boundary
from task_app.interactions.live import InteractionReply
from task_app.protocols import ConversationalEnvironment, DecisionOutcome, Observation, PastDecision

log = structlog.get_logger("task_app")

NOT_RUN = "error: not carried out: the episode had ended before"
LAST_SCORE = "last turn score: of the last answer, by the interaction"


class UserInteraction(Protocol):
    """The part of a started `task_app.interactions.live.LiveInteraction` that a conversation uses."""

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Answer the last assistant message as the user, and score it."""


class Conversation(Prompts):
    """Keeps the history of an episode in a conversational environment, and makes each prompt from it.

    The `interaction` is the simulated user. Without it, only the environment may answer a message without a
    tool call. The history begins with `opening`, the task's messages, before the environment's own messages.
    """

    def __init__(
        self,
        environment: ConversationalEnvironment,
        multi_turn: MultiTurn,
        interaction: AbstractAsyncContextManager[UserInteraction] | None = None,
        opening: Sequence[Message] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._environment = environment
        self._opening = opening
        self._clock = clock
        self._multi_turn = multi_turn
        self.context_length_penalty = multi_turn.context_length_penalty
        self._open_interaction = interaction
        self._interaction: UserInteraction | None = None
        self._context_tools = multi_turn.context_tools if multi_turn.statelm_enabled else ()
        self._user_turns = 0
        self._last_score = 0.0
        self.history: History
        # Number of messages in the previous prompt, and the edits that were active in it.
        self._shown_count = 0
        self._changes: Mapping[int, Change] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        if self._open_interaction is None:
            yield
            return
        async with self._open_interaction as self._interaction:
            yield

    def begin(self, past: Sequence[PastDecision]) -> None:
        self.tools = list_tools(self._environment) + context_specs(self._context_tools)
        with boundary("environment.opening"):
            opening = open_with(self._opening, self._environment.opening())
            self.history = History.start(opening, shows_ids=self._multi_turn.statelm_enabled)

    def prompt(self, observation: Observation) -> Prompt:
        messages, changes = self.history.view(), self.history.changes()
        ids = (self._changes.keys() | changes.keys()) & set(range(self._shown_count))
        changed = {
            number: messages[number]
            for number in sorted(ids)
            if self._changes.get(number) is not changes.get(number)
        }
        self._shown_count, reused = len(messages), self._shown_count
        self._changes = changes
        return Prompt(messages, reused, changed, self.history.view)

    async def carry_out(
        self, choice: Choice, action: Action, before: Observation, execute: Execute, budget: Budget
    ) -> DecisionEffect:
        environment_calls = tuple(call for call in action.requests if call.name not in self._context_tools)
        if environment_calls or not action.requests:
            outcome = await execute(replace(action, requests=environment_calls))
        else:
            outcome = DecisionOutcome(replace(before, reward_last_step=0.0), env_rewards=())
        # Keep the model's message exactly as the server returned it, so that its tokens stay the same.
        content = action.text if action.text is not None else encodable(choice.action.get("content") or "")
        message = Message(role="assistant", content=content, tool_calls=action.tool_calls or None)
        self.history = self.history.with_message(message)
        if action.requests:
            return DecisionEffect(self._answer_calls(action, outcome, budget))
        if action.terminate:
            return DecisionEffect(outcome)
        # If the environment refuses a text, the model gets the reason as the answer. Otherwise the
        # interaction answers, if there is one.
        over = outcome.terminated or outcome.truncated
        if outcome.invalid_reason is not None:
            self._add_user_message(f"error: {outcome.invalid_reason}")
            return DecisionEffect(outcome)
        if self._interaction is not None:
            return await self._interact(outcome, self._interaction)
        if outcome.result and not over:
            return DecisionEffect(outcome, user_is_silent=not self._add_user_turn(outcome.result))
        return DecisionEffect(outcome if over else replace(outcome, terminated=True))

    def remember(self, step: StepData, before: StepData | None) -> None:
        step.recall(self.history.full_history)

    def outcome(self) -> tuple[float, str]:
        return self._last_score, LAST_SCORE

    def trajectory_fields(self) -> dict[str, Any]:
        return {
            "full_history": self.history.full_history(),
            "deleted_msg_ids": self.history.deleted_msg_ids,
            "had_delete_operation": self.history.had_delete_operation,
        }

    def _answer_calls(self, action: Action, outcome: DecisionOutcome, budget: Budget) -> DecisionOutcome:
        """Append the result of every call to the history, in order; return the outcome with all results.

        The environment has already executed the calls of its own tools. This method executes the calls of
        context tools.
        """
        results, texts = self._index_results(action, outcome), []
        invalid_reason = outcome.invalid_reason
        # Of the environment's calls, the last call that was not refused is the one that ended the episode.
        executed = [index for index, text in results.items() if not text.startswith("error: ")]
        end_index = max(executed or results) if outcome.terminated or outcome.truncated else None
        for index, (call, request) in enumerate(zip(action.tool_calls, action.requests, strict=True)):
            fields = None
            if index in results:
                text = results[index]
            elif end_index is not None and index > end_index:
                text = NOT_RUN
            else:
                edit = apply(self.history, request, budget=budget)
                self.history, text, fields = edit.history, edit.text, edit.fields
                invalid_reason = invalid_reason or edit.refused
                if edit.changes_view:
                    log.info("context_edited", tool=request.name, result=text, used_tokens=budget.used_tokens)
            self.history = self.history.with_result(call, text, fields=fields)
            texts.append(text)
        return replace(outcome, invalid_reason=invalid_reason, results=tuple(texts))

    def _index_results(self, action: Action, outcome: DecisionOutcome) -> dict[int, str]:
        """Return the results of the environment's calls; a key is the index of a call in the model's message.

        Raises:
            CriticalError: the environment did not return one result for each call.
        """
        own = [i for i, request in enumerate(action.requests) if request.name not in self._context_tools]
        if len(own) != len(outcome.results):
            raise CriticalError(
                f"environment {self._environment.name!r} gave {len(outcome.results)} results for {len(own)} "
                "calls; step() owes each call one text in DecisionOutcome.results"
            )
        return dict(zip(own, outcome.results, strict=True))

    async def _interact(self, outcome: DecisionOutcome, interaction: UserInteraction) -> DecisionEffect:
        """Let the interaction answer and score the model's message (DESIGN.md 4.11).

        The message that ends the episode is scored, too.
        """
        start_s = self._clock()
        reply = await interaction.respond([entry.message for entry in self.history])
        took_s = self._clock() - start_s
        self._last_score = reply.score if reply.score is not None else self._last_score
        parts = () if reply.score is None else (RewardPart(source="interaction", value=reply.score),)
        is_shown = not reply.should_terminate and self._add_user_turn(reply.response)
        unshown = None if is_shown or not reply.response else reply.response
        has_record = reply.metadata or unshown
        answer = UserAnswer(metadata=reply.metadata, unshown=unshown) if has_record else None
        silent = not is_shown and not reply.should_terminate
        return DecisionEffect(outcome, parts, reply.should_terminate, silent, answer, took_s)

    def _add_user_turn(self, text: str) -> bool:
        """Append the user's answer and return True, or return False if `max_user_turns` is reached."""
        limit = self._multi_turn.max_user_turns
        if limit is not None and self._user_turns >= limit:
            return False
        self._user_turns += 1
        self._add_user_message(text)
        return True

    def _add_user_message(self, text: str) -> None:
        self.history = self.history.with_message(Message(role="user", content=text))
