"""Keeps the parts of a model folder that training does not change, and copies them to folders written later.

Some model classes (`...ForConditionalGeneration`) wrap a text model and, for example, a vision tower. Only
the text model of such a wrapper is trained; it is loaded as a causal language model. Vision towers,
projectors, multi-token prediction heads (`mtp.*`) and processor settings are copied to each written folder,
so that other programs can load the folder with its original class. One tensor has several names:

    in memory                        model.layers.0...                     the causal model of transformers
    in a folder (`as_stored`)        model.language_model.layers.0...      one tensor per expert
    in adapters (`Origin.decoder`)   model.language_model.layers.0...      the names in the wrapper's class
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.utils import logging

from trainer_backend.errors import ModelFolderError
from trainer_backend.models.layout import CONFIG, INDEX, KEPT, WEIGHTS, read_object, weight_files

# Patterns of the text model's tensor names in a wrapper's folder, and their prefixes in the causal model.
WRAPPED_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
_TEXT = "model-text.safetensors"
_ATTRIBUTE = "turnwise_origin"
# The infix that peft inserts into the names of weights that have adapters.
BELOW = ".base_layer"


@dataclass(frozen=True)
class Origin:
    """The parts of a model folder that training does not change. Copies of a model share one `Origin`."""

    config: Mapping[str, Any] | None = None
    """The wrapper's config.json; None if the model is no wrapper."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The content of each settings file of the processor, by file name."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The open file of each kept tensor, by tensor name. Open files stay readable even after deletion."""

    def __deepcopy__(self, memo: object) -> "Origin":
        return self

    @cached_property
    def decoder(self) -> str:
        """Return the text decoder's module name in the wrapper's class; `model` if there is no wrapper."""
        if self.config is None:
            return "model"
        config = AutoConfig.for_model(**self.config)
        with torch.device("meta"):
            kind: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
            wrapper: Any = kind._from_config(config)
        decoder = wrapper.get_decoder()
        if hasattr(decoder, "lm_head"):  # in Llama 4 the decoder is a causal model
            decoder = decoder.model
        name: str = next(name for name, module in wrapper.named_modules() if module is decoder)
        return name

    def write_kept(self, folder: Path) -> None:
        """Add the kept tensors, and an index of all weights, to a folder with the text model's weights."""
        if not self.kept:
            return
        if (folder / WEIGHTS).is_file():
            (folder / WEIGHTS).rename(folder / _TEXT)
            with safe_open(folder / _TEXT, "pt") as file:
                names = dict.fromkeys(file.keys(), _TEXT)
        else:
            names = dict(read_object(folder / INDEX)["weight_map"])
        save_file(
            {name: file.get_tensor(name) for name, file in self.kept.items()},
            folder / KEPT,
            metadata={"format": "pt"},
        )
        names |= dict.fromkeys(self.kept, KEPT)
        size = sum((folder / file).stat().st_size for file in set(names.values()))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write_settings(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the processor's settings to a folder, and the wrapper's config.json over the text model's."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if self.config is None:
            return
        name = str(dtype).removeprefix("torch.")
        config = {key: value for key, value in self.config.items() if key != "torch_dtype"}
        config |= {"dtype": name, "transformers_version": transformers.__version__}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_origin(model: PreTrainedModel) -> Origin:
    """Return the `Origin` that `remember_origin` attached; an empty one if the model has no folder."""
    return getattr(model, _ATTRIBUTE, None) or Origin()


def remember_origin(model: PreTrainedModel, folder: Path) -> None:
    """Read the `Origin` of the folder from which a model was loaded, and attach it to the model."""
    config = read_object(folder / CONFIG)
    is_wrapper = "text_config" in config
    own = set(as_stored(model, {name: weight.to("meta") for name, weight in model.state_dict().items()}))
    kept: dict[str, Any] = {}
    for path in weight_files(folder):
        file: Any = safe_open(path, "pt")
        others = (name for name in file.keys() if name not in own)  # noqa: SIM118  # it is no mapping
        kept |= {name: file for name in others if _is_kept(model, name, is_wrapper)}
    found = ((name, folder / name) for name in (PROCESSOR_FILES if is_wrapper else ()))
    files = {name: path.read_bytes() for name, path in found if path.is_file()}
    setattr(model, _ATTRIBUTE, Origin(config if is_wrapper else None, files, kept))


def _is_kept(model: PreTrainedModel, name: str, is_wrapper: bool) -> bool:
    """Return whether to keep a stored tensor that the text model does not have, or that its class ignores."""
    own = text_name(name)
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    if any(re.search(pattern, one) for pattern in patterns for one in (name, own)):
        return True
    parts = ["lm_head", *(f"model.{part}" for part, _ in model.model.named_children())]
    return is_wrapper and not own.startswith(tuple(f"{part}." for part in parts))


def plain_name(name: str) -> str:
    """Return the name that a weight has in the model without adapters."""
    return name.replace(BELOW, "")


def text_name(name: str) -> str:
    """Convert a tensor's name in a wrapper's folder to its name in memory; return other names unchanged."""
    for pattern, own in WRAPPED_NAMES.items():
        name = re.sub(pattern, own, name)
    return name


def as_stored(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a model's weights to the form of its folder: stored names, and one tensor per expert."""
    return dict(revert_weight_conversion(model, dict(weights)))


def from_stored(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert a folder's tensors to the names and form in memory; return unknown tensors unchanged."""
    own = {plain_name(name) for name in model.state_dict()}
    if own.issuperset(tensors) or any(".lora_" in name for name in tensors):
        return tensors
    types = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    plain: Any = type(model)
    with quiet_library():
        loaded, report = plain.from_pretrained(
            None,
            config=model.config,
            state_dict=dict(tensors),
            key_mapping=WRAPPED_NAMES,
            dtype=torch.float32 if len(types) > 1 else types.pop(),
            output_loading_info=True,
        )
    missing, unknown = report["missing_keys"], report["unexpected_keys"]
    weights = {name: weight for name, weight in loaded.state_dict().items() if name not in missing}
    return weights | {name: tensor for name, tensor in tensors.items() if name in unknown}


@contextmanager
def quiet_library() -> Iterator[None]:
    """Silence transformers' progress bars and its table of unread tensors, which break a run's live display.

    Callers must check themselves whether a required tensor is missing.
    """
    was_enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def refuse_joined(model: PreTrainedModel) -> None:
    """Raise ModelFolderError if the model's folder stores several of its tensors as a single tensor.

    Weights are sent tensor by tensor, so a joined tensor could not be sent.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            joined = ", ".join(conversion.target_patterns)
            raise ModelFolderError(
                f"{joined} are one tensor in its folder, but weights are sent one by one",
                where="model",
                hint="Train it on one rank, and publish whole folders of weights.",
            )
