"""Tiny model folders, file by file as the hub has them: Qwen3, Llama 3.2 and Mistral 7B v0.3 in small."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.protocols import ToolRequest

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# Ids that the model embeds and no tokenizer knows: Qwen rounds its embedding up.
PADDING_ROWS = 37


@dataclass(frozen=True, slots=True)
class Family:
    """What is told apart by family in tests.

    Attributes:
        written: the call `interact_many(actions=["do", "sleep"])` as the model writes it.
        stop: the token behind it.
    """

    name: str
    tool_format: str
    written: str
    stop: str


_ARGUMENTS = '{"actions": ["do", "sleep"]}'
FAMILIES = (
    Family(
        "qwen3",
        "hermes",
        f'<tool_call>\n{{"name": "interact_many", "arguments": {_ARGUMENTS}}}\n</tool_call>',
        "<|im_end|>",
    ),
    Family("llama", "llama", f'{{"name": "interact_many", "parameters": {_ARGUMENTS}}}', "<|eot_id|>"),
    Family(
        "mistral",
        "mistral",
        f'[TOOL_CALLS] [{{"name": "interact_many", "arguments": {_ARGUMENTS}, "id": "a1B2c3D4e"}}]',
        "</s>",
    ),
)


def make_model_folders(root: Path) -> Mapping[str, Path]:
    """A folder for each of FAMILIES."""
    texts = training_texts()
    make_qwen3(root / "qwen3", texts)
    make_llama(root / "llama", texts)
    make_mistral(root / "mistral", texts)
    return {family.name: root / family.name for family in FAMILIES}


def training_texts() -> list[str]:
    """What the models will see: a few observations, the tool, and calls of it."""
    environment = CrafterEnvironment(CrafterConfig(text="compact", max_actions=2))
    move = ToolRequest(name="interact_many", arguments={"actions": ["move_left", "do"]}, raw_arguments="")
    texts = [json.dumps(tool.model_dump(mode="json"), indent=4) for tool in environment.tools()]
    texts += [json.dumps(tool.model_dump(mode="json")) for tool in environment.tools()] * 3
    for seed in range(6):
        texts.append(environment.reset(seed).text)
        texts += [environment.step([move]).observation.text for _ in range(6)]
    return texts + [family.written for family in FAMILIES] * 4


def chat_template(name: str) -> str:
    """One of tests/chat_templates, written here after a family's published conventions."""
    path = Path(__file__).with_name("chat_templates") / f"{name}.jinja"
    return path.read_text(encoding="utf-8").removesuffix("\n")


def make_qwen3(folder: Path, texts: Sequence[str]) -> None:
    """Byte-level BPE, tied embedding with unused rows, two end tokens, bfloat16 in one file."""
    tokenizer = byte_level(texts)
    tokenizer.normalizer = normalizers.NFC()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens(specials)
    tags = ["tool_call", "tool_response", "think"]
    tokenizer.add_tokens([tag for name in tags for tag in (f"<{name}>", f"</{name}>")])
    end, *_ = (tokenizer.token_to_id(name) for name in specials)
    stop = tokenizer.token_to_id("<|im_end|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size() + PADDING_ROWS,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=end,
        eos_token_id=stop,
        **SIZE,
    )
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "chat_template": chat_template("qwen3"),
    }
    write_folder(folder, Qwen3ForCausalLM, config, tokenizer, settings, eos=[stop, end])


def make_llama(folder: Path, texts: Sequence[str]) -> None:
    """Byte-level BPE that adds <|begin_of_text|>, scaled positions, tied embedding, three end tokens."""
    tokenizer = byte_level(texts)
    names = [
        "begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag",
    ]  # fmt: skip
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    begin, end, eom, eot = (
        tokenizer.token_to_id(f"<|{name}|>") for name in ("begin_of_text", "end_of_text", "eom_id", "eot_id")
    )
    add_begin(tokenizer, "<|begin_of_text|>", begin)
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 500000.0, **scaling},
        bos_token_id=begin,
        eos_token_id=[end, eom, eot],
        **SIZE,
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": chat_template("llama"),
    }
    write_folder(folder, LlamaForCausalLM, config, tokenizer, settings, eos=[end, eom, eot])


def make_mistral(folder: Path, texts: Sequence[str]) -> None:
    """SentencePiece-like BPE with byte fallback, an own head, two templates, weights in several shards."""
    specials = [
        "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    ]  # fmt: skip
    tokenizer = sentencepiece_like(texts, specials)
    add_begin(tokenizer, "<s>", 1)
    config = MistralConfig(
        vocab_size=tokenizer.get_vocab_size(),
        tie_word_embeddings=False,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
        **SIZE,
    )
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": False,
        "chat_template": [
            {"name": "default", "template": chat_template("mistral_plain")},
            {"name": "tool_use", "template": chat_template("mistral")},
        ],
    }
    write_folder(folder, MistralForCausalLM, config, tokenizer, settings, eos=2, shards=3)


def byte_level(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentencepiece_like(texts: Sequence[str], specials: Sequence[str]) -> Tokenizer:
    """Ids as SentencePiece gives them: specials, the 256 bytes, then merges and characters."""
    space = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    learned.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    pieces = [*specials, *BYTE_TOKENS, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = space
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def add_begin(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    """As real ones do: whoever encodes a rendered prompt with special tokens gets the first one twice."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


def write_folder(
    folder: Path,
    architecture: type[PreTrainedModel],
    config: PreTrainedConfig,
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    *,
    eos: int | list[int],
    shards: int = 1,
) -> None:
    """config.json, generation_config.json, bfloat16 weights, tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = architecture(config)
    described = {**config.to_diff_dict(), "architectures": [architecture.__name__], "dtype": "bfloat16"}
    write_json(folder / "config.json", described)
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos, **sampling})
    save_weights(folder, model, shards)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = json.loads(tokenizer.to_str())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder, **settings})


def save_weights(folder: Path, model: PreTrainedModel, shards: int) -> None:
    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    home = {name: names[index % shards] for index, name in enumerate(sorted(tensors))}
    for file in names:
        part = {name: tensor for name, tensor in tensors.items() if home[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": home}
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    write_json(path, {key: item for key, item in value.items() if item is not None})
