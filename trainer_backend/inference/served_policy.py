"""Represent one policy behind the gateway: its engine, renderer and tool-call format."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.base import did_you_mean
from trainer_backend.errors import BadChatRequest, ModelFolderError, UnknownModel
from trainer_backend.inference.actor import FrozenEngine
from trainer_backend.inference.chat_check import QUESTION
from trainer_backend.inference.drift import ConversationFigures
from trainer_backend.inference.engine import stop_token_ids
from trainer_backend.inference.rendering import PROBE_ANSWER, PROBE_NAME, PROBE_TOOLS, ChatRenderer
from trainer_backend.inference.tool_format import tool_format_in_use
from trainer_backend.job.tables import ModelTable
from trainer_backend.models.folder import embedding_rows, folder_config, load_tokenizer
from trainer_backend.models.sources import remember_chat_settings
from trainer_backend.tool_formats.calls import ToolFormat
from trainer_backend.tool_formats.tags import THINK_START


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """The facts that servers of a policy need in addition to its weights."""

    table: ModelTable
    """The job's table [model], which contains the chat settings and the device."""
    tokenizer: PreTrainedTokenizerFast
    stop_ids: tuple[int, ...]
    """The token ids that end an answer."""
    vocabulary: int
    """The number of token ids for which the model has an embedding."""

    @classmethod
    def of_model(cls, table: ModelTable, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Self:
        return cls(
            table, tokenizer, stop_token_ids(model.generation_config, tokenizer), embedding_rows(model)
        )

    @classmethod
    def of_folder(cls, table: ModelTable, folder: Path) -> Self:
        """Read the facts from a model folder without loading its weights."""
        config = folder_config(folder)
        try:  # the generation config that the folder's model would have
            if (folder / "generation_config.json").is_file():
                generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
            else:
                generation = GenerationConfig.from_model_config(config)
        except Exception as error:  # the library raises a dozen exception types for invalid values
            raise ModelFolderError(f"its config cannot be used: {error}", where=str(folder)) from error
        vocabulary = config.get_text_config().vocab_size
        tokenizer = load_tokenizer(folder, known_ids=vocabulary)
        remember_chat_settings(tokenizer, table)
        return cls(table, tokenizer, stop_token_ids(generation, tokenizer), vocabulary)


@dataclass(frozen=True, slots=True)
class CallOpening:
    """The beginning of a tool call up to its arguments, as the model's own chat template writes it.

    If a request forces a tool call, its prompt ends with this opening. The model samples the rest of the call
    without a grammar, because a grammar would change the distribution that is trained (DESIGN.md 4.9). So the
    sampled call may be incomplete.
    """

    lead: str
    """The text before the opening; it ends a reasoning block that the prompt has begun. It is left empty if
    it would contain a whole reasoning block, since templates drop such blocks from earlier answers."""
    before_name: str
    after_name: str
    rest: str
    """The text after the opening in a sample call: the arguments of `rendering.PROBE_CALL`, and the end."""

    def carries(self, name: str, tool_format: ToolFormat) -> bool:
        """Return whether `tool_format` can parse a call of the tool `name`.

        For example, a quotation mark in the name makes a JSON call unreadable.
        """
        written = self.before_name + name + self.after_name + self.rest
        return [call.name for call in tool_format.parse(written, PROBE_TOOLS).tool_calls] == [name]

    def text(self, name: str | None) -> str:
        """Return the opening up to the call's arguments or, if `name` is None, up to the tool's name.

        Characters at the end that tokenizers would join with the sampled text, such as spaces, are left out.
        """
        if name is None:
            return self.before_name.removesuffix('"').rstrip(" ")
        return self.before_name + name + self.after_name.rstrip(" ")


def find_opening(renderer: ChatRenderer, tool_format: ToolFormat) -> CallOpening | None:
    """Find how the template begins a call; return None if `tool_format` cannot parse the template's calls."""
    try:
        written = renderer.answer_text(QUESTION, PROBE_ANSWER, PROBE_TOOLS)
    except BadChatRequest:
        return None
    end = renderer.tokenizer.eos_token or ""
    before, name, after = (written or "").removesuffix(end).partition(PROBE_NAME)
    arguments = re.search(tool_format.arguments_start, after)
    if not name or arguments is None:
        return None
    length = arguments.end()
    starts = [before.find(opener) for opener in tool_format.openers if opener and opener in before]
    start = min(starts, default=0)
    lead = "" if THINK_START in before[:start] else before[:start]
    opening = CallOpening(lead, before[start:], after[:length], after[length:])
    return opening if opening.carries(PROBE_NAME, tool_format) else None


class ServedPolicy:
    """A policy that the gateway serves, with its engine, renderer and tool-call format."""

    def __init__(self, engine: FrozenEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self.engine = engine
        self.renderer = ChatRenderer(tokenizer)
        self.figures = ConversationFigures()
        self.tool_format = tool_format_in_use(tokenizer)
        self.call_opening = find_opening(self.renderer, self.tool_format)  # None: no call can be forced
        self.left_out: Counter[str] = Counter()  # how often each setting of a request had no effect

    def name_to_write(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the tool's name if the opening of a forced call should contain it, else None.

        The result is None if the model must write the name itself, because it chooses among several tools or
        because the template would not escape the name. It is also None if calls of these tools have no name.
        """
        if self.call_opening is None or len(tools) != 1 or self.tool_format.leaves_out_name(tools):
            return None
        name = str(tools[0]["function"]["name"])
        return name if self.call_opening.carries(name, self.tool_format) else None


def find_policy(name: str, policies: Mapping[str, ServedPolicy]) -> ServedPolicy:
    if name not in policies:
        raise UnknownModel(f"model is {name!r:.200}{did_you_mean(name, policies)}", where="model")
    return policies[name]
