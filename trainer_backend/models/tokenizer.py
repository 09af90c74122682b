"""The presets' tokenizer: byte-level BPE that is trained on a run's prompts, with a short chat template.

A token never spans more than a word and the space before the word. Frequent words of observations and all
action names become one token each; rare words are split, if necessary into bytes. Decoding restores every
text exactly. An example of a rendered prompt and answer:

    <|user|>wood 2 tree 3 left<|assistant|><|call|> move_left do<|end|>
"""

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import ModelFolderError

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")
# Key of tokenizer_config.json that names the tool-call format; `inference.tool_format` reads it.
TOOL_CALL_FORMAT_KEY = "turnwise_tool_call_format"
# Key of tokenizer_config.json with further variables of the chat template; `inference.rendering` reads it.
CHAT_TEMPLATE_KWARGS_KEY = "turnwise_chat_template_kwargs"
WORD_PATTERN = r" ?[^\s]+|\s+"
# Number of times that each of `whole_words` occurs in the training text: more often than any other word, so
# that BPE merges these words first.
WHOLE_WORD_COUNT = 20_000

# Writes a call in its short form (tool_formats/turnwise.py) if there is one tool, and its only argument is an
# enum value or a list of enum values.
CHAT_TEMPLATE = """\
{%- set ns = namespace(short='') -%}
{%- if tools and tools|length == 1 -%}
  {%- set args = (tools[0].function.parameters or {}).properties or {} -%}
  {%- for value in args.values() if args|length == 1 -%}
    {%- if value.type == 'array' and (value['items'] or {}).enum -%}{%- set ns.short = 'list' -%}{%- endif -%}
    {%- if value.type == 'string' and value.enum -%}{%- set ns.short = 'item' -%}{%- endif -%}
  {%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|' + message.role + '|>' -}}
  {%- if message.content is string -%}{{- message.content -}}{%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {%- set arguments = call.function.arguments -%}
    {%- set alone = arguments is mapping and arguments|length == 1 -%}
    {%- if alone and ns.short == 'list' and arguments.values()|first is not string -%}
      {{- '<|call|> ' + (arguments.values()|first|join(' ')) -}}
    {%- elif alone and ns.short == 'item' and arguments.values()|first is string -%}
      {{- '<|call|> ' + (arguments.values()|first) -}}
    {%- else -%}
      {{- '<|call|> ' + call.function.name + ' ' -}}
      {{- arguments if arguments is string else arguments|tojson -}}
    {%- endif -%}
  {%- endfor -%}
  {%- if message.role == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, *, whole_words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train the presets' tokenizer and return it with its chat template.

    Args:
        texts: prompts in the form in which the model reads them. Their frequent words become single tokens.
        vocab_size: the largest number of tokens: 256 bytes, the special tokens, and merges.
        whole_words: the action names. Each becomes one token with its leading space, even if `texts` do not
            contain it.

    Raises:
        ModelFolderError: `vocab_size` is too small for `whole_words`.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(texts, whole_words), trainer)
    split_words = [word for word in whole_words if len(tokenizer.encode(f" {word}").ids) != 1]
    if split_words:
        raise ModelFolderError(
            f"a vocabulary of {vocab_size} splits {', '.join(split_words)}",
            where="model.vocab_size",
            hint=f"{len(whole_words)} words must be single tokens; allow a larger vocabulary.",
        )
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        **{TOOL_CALL_FORMAT_KEY: "turnwise"},
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def id_count(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of embedding rows that the tokenizer needs: its highest id plus 1."""
    return max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _corpus(texts: Iterable[str], whole_words: Sequence[str]) -> Iterable[str]:
    # The encoder separates special tokens from the text before it applies merges. If the training texts kept
    # their special tokens, BPE would learn merges across them, which the encoder could never use.
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for text in texts:
        yield from special.split(text)
    for word in whole_words:
        # Few long lines: 20,000 strings per word would take longer than the training.
        for _ in range(WHOLE_WORD_COUNT // 10_000):
            yield f" {word}" * 10_000
