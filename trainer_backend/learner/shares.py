"""What the ranks of a learner write and read together, each its share: model folders and the optimizer.

A model folder has Hugging Face's layout, so that every program loads it: whole tensors, each sent to the rank
that writes it. The optimizer's moments are written as they lie, by torch's distributed checkpoint
in safetensors, and any number of ranks reads them again.
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

# In a checkpoint's training_state/: the whole optimizer of one rank, or a folder with every rank's share.
OPTIMIZER_FILE, OPTIMIZER_FOLDER = "optimizer.safetensors", "optimizer"
# The number of a weight among those that are trained, and what AdamW keeps of it: `0.exp_avg`.
_ENDS = 64
_MOMENT = re.compile(r"(\d+)\.(\w+)")


@torch.no_grad()
def write_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    finished: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, tensor: {name: tensor},
) -> None:
    """Write a model's weights, a file on each rank, and the index.

    Of the whole model a rank holds the largest tensor and what it writes. The weights have one order on every
    rank; `finished` makes of a gathered tensor those that are written.
    """
    writers = _writers(weights, ranks.count)
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


def _writers(weights: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """The rank that writes each tensor: the largest ones first, each to the rank with the least so far."""
    shares, writers = [0] * count, dict.fromkeys(weights, 0)
    for name in sorted(weights, key=lambda name: -weights[name].numel()):
        writers[name] = shares.index(min(shares))
        shares[writers[name]] += weights[name].numel()
    return writers


def checksum_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> int:
    """A number that another model, another revision of it, or another vocabulary would not have.

    Of each weight its ends are read: whole ones would take as long as loading them.
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
    """Raise torch's error, which is no Exception, as a CheckpointError on all ranks."""
    try:
        yield
    except CheckpointException as error:
        causes = (cause for cause, _ in error.failures.values())
        raise CheckpointError(f"{folder}: {error}") from next(causes, None)


def restore_moments(folder: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Read what `save_moments` wrote, on any number of ranks; CheckpointError where it is another model's."""
    path = folder / OPTIMIZER_FOLDER if (folder / OPTIMIZER_FOLDER).is_dir() else folder
    reader = HuggingFaceStorageReader(str(path))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        found = _MOMENT.fullmatch(key)
        if found is None:
            continue  # another file's, or the placeholder of an optimizer that has not stepped
        number, size = int(found[1]), getattr(stored, "size", None)
        if number >= len(weights) or (size and size != weights[number].shape):
            raise CheckpointError(f"{folder.parent}: the optimizer state is of another model ({key})")
        moments[key] = torch.zeros_like(weights[number]) if size else torch.zeros(())
    with warnings.catch_warnings(), _as_checkpoint_error(folder):
        # That there is one process alone.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(moments, storage_reader=reader, process_group=ranks.control, no_dist=not ranks.are_several)
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        of_weight, _, name = key.partition(".")
        state.setdefault(int(of_weight), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
