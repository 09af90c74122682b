"""Warm-up: supervised training on a teacher's decisions before RL, so that RL starts from a useful policy."""

import math
import random
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from shared_schemas.messages import Message
from shared_schemas.trajectory import StepData, Trajectory, prompts
from trainer_backend.core.aggregation import token_mean
from trainer_backend.core.imitation import find_target, worth_imitating
from trainer_backend.core.schedules import learning_rate
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.segments import CONTEXT, Segment
from trainer_backend.errors import JobError, JobTeachesNothing, NonFiniteLoss, place
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.job.rollout_table import WarmupTable
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.learner.optimizer import make_adamw
from trainer_backend.learner.scoring import Scorer, cut_pieces
from trainer_backend.learner.sharding import clip_gradient

# The learning rate rises over this share of the warm-up's steps.
_RISE = 0.03
# At most this many decisions are rendered together, which bounds the memory for the texts of long episodes.
_RENDERED = 64


def demonstrations(
    trajectories: Sequence[Trajectory],
    renderer: ChatRenderer,
    *,
    min_outcome_reward: float,
    allowed: Collection[int] | None = None,
) -> list[Segment]:
    """Build a segment for every decision worth imitating, from episodes that reach `min_outcome_reward`.

    The prompt is rendered as in the gateway. The target is the decision, or the teacher's label for it, as
    the model would have to write it: in the model's tool-call format, with the stop token at the end. Only
    tokens in `allowed` become targets; None: all. Raises JobTeachesNothing if no segment results.
    """
    kept = [item for item in trajectories if item.outcome_reward >= min_outcome_reward]
    segments = []
    for number, trajectory in enumerate(kept):
        tools = [tool.model_dump(mode="json") for tool in trajectory.tools]
        seen = zip(trajectory.steps, prompts(trajectory.steps), strict=True)
        imitated = [(step, messages) for step, messages in seen if worth_imitating(step)]
        for first in range(0, len(imitated), _RENDERED):
            part = imitated[first : first + _RENDERED]
            for (step, _), prompt, target in zip(part, *_tokenise(part, tools, renderer), strict=True):
                given, sampled = _cut(prompt, target, allowed)
                segments.append(_segment(f"demonstration {number}", step.turn - 1, given, sampled))
    if not segments:
        raise JobTeachesNothing(
            f"warmup: none of {len(trajectories)} episodes has a valid decision and an outcome of "
            f"{min_outcome_reward} (warmup.min_outcome_reward)"
        )
    return segments


def warm_up(
    scorer: Scorer,
    segments: Sequence[Segment],
    table: WarmupTable,
    training: TrainingTable,
    *,
    seed: int,
    tell: Callable[[int, int], None],
) -> dict[str, float]:
    """Minimise the mean negative log-prob of the demonstrations' target tokens.

    The job's `seed` determines the order of the demonstrations. `tell(done, total)` is called with numbers of
    steps; an exception that it raises ends the warm-up. Returns metrics, such as the mean loss per token
    (nats) over the last epoch, and the number of tokens of the longest target.
    """
    rate, decay, offload = table.learning_rate, table.weight_decay, training.optimizer_offload
    optimizer = make_adamw(scorer.model, rate, decay, betas=(0.9, 0.98), offload=offload)
    batches_per_epoch = -(-len(segments) // table.batch_decisions)
    total = batches_per_epoch * table.epochs
    losses: list[float] = []
    tell(0, total)
    for epoch in range(table.epochs):
        order = list(segments)
        random.Random(derived_seed(seed, "warmup-shuffle", epoch)).shuffle(order)
        for first in range(0, len(order), table.batch_decisions):
            rate = learning_rate(table.learning_rate, progress=len(losses) / total, rise=_RISE, final=0.0)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = order[first : first + table.batch_decisions]
            losses.append(_step(scorer, optimizer, batch, table, training=training))
            tell(len(losses), total)
    last = losses[-batches_per_epoch:]
    return {
        "warmup/examples": float(len(segments)),
        "warmup/steps": float(len(losses)),
        "warmup/loss": sum(last) / len(last),
        "warmup/answer_tokens_max": float(max(len(segment.logprobs) for segment in segments)),
    }


def _step(
    scorer: Scorer,
    optimizer: torch.optim.Optimizer,
    segments: Sequence[Segment],
    table: WarmupTable,
    *,
    training: TrainingTable,
) -> float:
    weight = float(token_mean(segments)[0][0])
    optimizer.zero_grad(set_to_none=True)
    total, ranks, weights = 0.0, scorer.ranks, list(scorer.model.parameters())
    for piece, counts in ranks.own_pieces(cut_pieces(segments, training, scorer)[1]):
        loss = -(weight if counts else 0.0) * scorer.logprobs(piece).sum()
        (of_all,) = ranks.sums(loss.item())
        if not math.isfinite(of_all):
            raise NonFiniteLoss(f"warmup: the loss is {of_all}", hint="Lower warmup.learning_rate")
        loss.backward()  # type: ignore[no-untyped-call]
        total += of_all
    ranks.sum_gradients(weights)
    norm = clip_gradient(weights, table.max_grad_norm)
    if not math.isfinite(norm):
        raise NonFiniteLoss(f"warmup: the norm of the gradient is {norm}", hint="Lower warmup.learning_rate")
    optimizer.step()
    return total


def _tokenise(
    imitated: Sequence[tuple[StepData, Sequence[Message]]],
    tools: Sequence[dict[str, Any]],
    renderer: ChatRenderer,
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokenise each decision's prompt and its answer: the text and tool calls that the model should imitate.

    One call for many decisions takes a third of the time of one call per decision.
    """
    conversations = [[message.model_dump(exclude_none=True) for message in seen] for _, seen in imitated]
    replies = [
        {"role": "assistant", "content": words} | ({"tool_calls": calls} if calls else {})
        for calls, words in (find_target(step) for step, _ in imitated)
    ]
    texts, answers = renderer.answer_texts(conversations, replies, tools)
    targets = [answer for answer in answers if answer is not None]
    if len(targets) < len(answers):
        raise JobTeachesNothing(
            "warmup: the chat template does not continue its own generation prompt, so an answer cannot be "
            "cut out of a rendered conversation"
        )
    return renderer.encode_all(texts), renderer.encode_all(targets)


def _cut(
    prompt: list[int], target: list[int], allowed: Collection[int] | None
) -> tuple[list[int], list[int]]:
    """Return a prompt and target such that the target has only tokens that the model may sample.

    Tokens before the first allowed one move into the prompt; tokens after the allowed ones are dropped.
    """
    if allowed is None:
        return prompt, target
    opening = list(takewhile(lambda token: token not in allowed, target))
    return prompt + opening, list(takewhile(lambda token: token in allowed, target[len(opening) :]))


def _segment(name: str, t: int, prompt: Sequence[int], target: Sequence[int]) -> Segment:
    if not prompt or not target:
        raise JobTeachesNothing(f"{place(name, t + 1)}: an empty prompt or answer")
    span = (len(prompt), len(prompt) + len(target), t, CONTEXT, 1.0)
    return Segment.of(name, [*prompt, *target], [0.0] * len(target), [span])


def prompt_texts(trajectories: Sequence[Trajectory]) -> list[str]:
    """Collect the texts to train a tokenizer on: prompt messages, text replies, and tool calls."""
    texts = [
        text
        for trajectory in trajectories
        for step in trajectory.steps
        for text in (
            *[message.content for message in step.observation_data.messages],
            step.action_taken.get("content"),
            # With a single tool, a preset writes a call as `tool_words` alone, each of which is one token.
            *[
                f" {call.function.name} {call.function.arguments}"
                for call in step.tool_calls
                if len(trajectory.tools) > 1
            ],
        )
        if text
    ]
    if not texts:
        raise JobTeachesNothing("no prompt was seen, so there is nothing to train a tokenizer on")
    return texts


def tool_words(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the string `enum` values in the schemas of the tools' arguments; each becomes one token."""
    words: dict[str, None] = {}
    for trajectory in trajectories[:1]:
        for tool in trajectory.tools:
            _enum_words(tool.function.parameters, words)
    return list(words)


def tool_word_ids(trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the token ids of `tool_words`; with model.only_tool_words, a preset samples only these tokens.

    Raises JobError unless the environment has a single tool, with the same enum values in all episodes.
    """
    words, tools = tool_words(trajectories), trajectories[0].tools
    found = f"{len(tools)} tools with {len(words)} listed words"
    if any(tool_words([other]) != words for other in trajectories):
        found = "tools with other words in other worlds"
    elif len(tools) == 1 and words:
        return [tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in words]
    raise JobError(
        f"the environment has {found}; it needs one tool that lists the same words in every world",
        where="model.only_tool_words",
    )


def _enum_words(schema: Any, words: dict[str, None]) -> None:
    if isinstance(schema, dict):
        words.update(dict.fromkeys(word for word in schema.get("enum", ()) if isinstance(word, str)))
        for value in schema.values():
            _enum_words(value, words)
