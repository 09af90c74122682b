"""Writes model folders, and writes and reads optimizer state, on all ranks of a learner together.

A model folder has Hugging Face's layout; each tensor is gathered on the rank that writes it. The optimizer's
moments are not gathered: each rank writes its share by torch's distributed checkpoint, in safetensors. Any
number of ranks can read them.
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

# Names in a checkpoint's training_state/: a single rank writes the file; several ranks write the folder.
OPTIMIZER_FILE, OPTIMIZER_FOLDER = "optimizer.safetensors", "optimizer"
# How many numbers at the beginning, and at the end, of each weight the checksum reads.
_ENDS = 64
# The key of an optimizer tensor: index of the trained weight, and name of its AdamW state, as in `0.exp_avg`.
_MOMENT = re.compile(r"(\d+)\.(\w+)")


@torch.no_grad()
def write_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    finished: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, tensor: {name: tensor},
) -> None:
    """Write a model's weights, one safetensors file per rank, and the index of the files.

    A rank needs memory for the tensors that it writes and for the largest tensor. `weights` must have the
    same order on all ranks. `finished` maps the name and value of a gathered tensor to the tensors to write.
    """
    writers = _assign_writers(weights, ranks.count)
    mine: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        full = sent_to(tensor, writers[name])
        if full is not None:
            mine |= {own: part.cpu().contiguous() for own, part in finished(name, full).items()}
        del full  # frees its memory before the next tensor is gathered
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
    """Assign each tensor to a rank: the largest first, always to the rank with the fewest numbers so far."""
    shares, writers = [0] * count, dict.fromkeys(weights, 0)
    for name in sorted(weights, key=lambda name: -weights[name].numel()):
        writers[name] = shares.index(min(shares))
        shares[writers[name]] += weights[name].numel()
    return writers


def checksum_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> int:
    """Compute a checksum that distinguishes models, revisions of a model, and vocabularies.

    It covers only both ends of each weight: reading all numbers would take as long as loading the model.
    """
    crc32 = zlib.crc32(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, weight in collect_weights(model).items():
        numbers = weight.flatten()
        ends = torch.cat((numbers[:_ENDS], numbers[-_ENDS:])).float().numpy().tobytes()
        crc32 = zlib.crc32(f"{name} {tuple(weight.shape)}".encode() + ends, crc32)
    return crc32


def save_moments(folder: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Write the optimizer's state into `folder`, the training_state/ of a checkpoint."""
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
    """Convert torch's CheckpointException, which is not a subclass of Exception, to a CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        causes = (cause for cause, _ in error.failures.values())
        raise CheckpointError(f"{folder}: {error}") from next(causes, None)


def restore_moments(folder: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Load what `save_moments` wrote, with any number of ranks, into the optimizer.

    Raises CheckpointError if the state belongs to another model.
    """
    path = folder / OPTIMIZER_FOLDER if (folder / OPTIMIZER_FOLDER).is_dir() else folder
    reader = HuggingFaceStorageReader(str(path))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        found = _MOMENT.fullmatch(key)
        if found is None:
            continue  # a tensor of another file, or the placeholder `empty` of an optimizer without state
        number, size = int(found[1]), getattr(stored, "size", None)
        if number >= len(weights) or (size and size != weights[number].shape):
            raise CheckpointError(f"{folder.parent}: the optimizer state is of another model ({key})")
        moments[key] = torch.zeros_like(weights[number]) if size else torch.zeros(())
    with warnings.catch_warnings(), _as_checkpoint_error(folder):
        # torch warns if there is a single process.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(moments, storage_reader=reader, process_group=ranks.control, no_dist=not ranks.are_several)
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
