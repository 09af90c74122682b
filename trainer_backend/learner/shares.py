"""Model folders and optimizer state that the ranks of a learner write and read together.

A model folder has Hugging Face's layout: each tensor is gathered on the rank that writes it. The optimizer's
moments are written in shares, by torch's distributed checkpoint in safetensors, for any number of readers.
"""

import json
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainer_backend.errors import CheckpointError
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.sharding import sent_to
from trainer_backend.models.folder import collect_weights
from trainer_backend.models.layout import INDEX

# In a checkpoint's training_state/: the optimizer of a single rank, or a folder with every rank's share.
OPTIMIZER_FILE, OPTIMIZER_FOLDER = "optimizer.safetensors", "optimizer"
# Numbers at either end of a weight that its checksum includes.
_ENDS = 64
# The index of a trained weight, and the name of its AdamW state: `0.exp_avg`.
_MOMENT = re.compile(r"(\d+)\.(\w+)")


@torch.no_grad()
def write_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    finished: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, tensor: {name: tensor},
) -> None:
    """Write a model's weights, one file per rank, and the index.

    A rank holds at most the largest tensor and the tensors that it writes. `weights` have the same order on
    all ranks. `finished` converts a gathered tensor to the tensors that are written.
    """
    writers = _assign_writers(weights, ranks.count)
    mine: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        full = sent_to(tensor, writers[name])
        if full is not None:
            mine |= {own: part.cpu().contiguous() for own, part in finished(name, full).items()}
        del full  # before the next one comes
    names = [f"model-{number:05}-of-{ranks.count:05}.safetensors" for number in range(1, ranks.count + 1)]
    ranks.together(lambda: save_file(mine, folder / names[ranks.index], metadata={"format": "pt"}))
    written = ranks.of_every_rank({name: tensor.nbytes for name, tensor in mine.items()})
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in written)},
        "weight_map": {name: file for file, sizes in zip(names, written, strict=True) for name in sizes},
    }
    text = json.dumps(index, indent=2)
    ranks.first_alone(lambda: (folder / INDEX).write_text(text, encoding="utf-8"))


def _assign_writers(weights: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """Assign each tensor, largest first, to the rank that writes least so far."""
    shares, writers = [0] * count, dict.fromkeys(weights, 0)
    for name in sorted(weights, key=lambda name: -weights[name].numel()):
        writers[name] = shares.index(min(shares))
        shares[writers[name]] += weights[name].numel()
    return writers


def checksum_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> int:
    """Compute a checksum that distinguishes models, revisions and vocabularies.

    It reads only both ends of each weight; all numbers would take as long as loading.
    """
    crc32 = zlib.crc32(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, weight in collect_weights(model).items():
        numbers = weight.flatten()
        ends = torch.cat((numbers[:_ENDS], numbers[-_ENDS:])).float().numpy().tobytes()
        crc32 = zlib.crc32(f"{name} {tuple(weight.shape)}".encode() + ends, crc32)
    return crc32


def save_moments(folder: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Write the optimizer's state into a checkpoint's training_state/."""
    moments = {
        f"{number}.{name}": torch.as_tensor(value)
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    } or {"empty": torch.zeros(1)}  # AdamW has no state before its first step
    if not ranks.are_several:
        save_file({name: tensor.contiguous() for name, tensor in moments.items()}, folder / OPTIMIZER_FILE)
        return
    writer = HuggingFaceStorageWriter(str(folder / OPTIMIZER_FOLDER), save_distributed=True)
    with _as_checkpoint_error(folder):
        save(moments, storage_writer=writer, process_group=ranks.control)


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert torch's error, which is not an Exception, to a CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        causes = (cause for cause, _ in error.failures.values())
        raise CheckpointError(f"{folder}: {error}") from next(causes, None)


def restore_moments(folder: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Load what `save_moments` wrote, on any number of ranks. Raises CheckpointError for another model."""
    path = folder / OPTIMIZER_FOLDER if (folder / OPTIMIZER_FOLDER).is_dir() else folder
    reader = HuggingFaceStorageReader(str(path))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        found = _MOMENT.fullmatch(key)
        if found is None:
            continue  # of another file, or the placeholder of an optimizer before its first step
        number, size = int(found[1]), getattr(stored, "size", None)
        if number >= len(weights) or (size and size != weights[number].shape):
            raise CheckpointError(f"{folder.parent}: the optimizer state is of another model ({key})")
        moments[key] = torch.zeros_like(weights[number]) if size else torch.zeros(())
    with warnings.catch_warnings(), _as_checkpoint_error(folder):
        # The warning that there is a single process.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(moments, storage_reader=reader, process_group=ranks.control, no_dist=not ranks.are_several)
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
