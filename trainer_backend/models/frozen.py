"""A model that nobody trains: told from others by its weights, and cut to the ids that another one knows."""

import hashlib
from itertools import chain
from operator import itemgetter

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer_backend.models.folder import embedding_rows


def fingerprint(model: nn.Module) -> str:
    """sha256, in hex, over name, type, shape and bytes of every weight in the order of their names.

    Tied weights count once, and buffers that are saved with the weights are some. The same weights in another
    type have another one.
    """
    digest, saved = hashlib.sha256(), model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    for name, weight in sorted(chain(model.named_parameters(), buffers), key=itemgetter(0)):
        tensor = weight.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # As plain bytes: numpy knows no bfloat16.
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def drop_rows_beyond(model: PreTrainedModel, rows: int) -> int:
    """Let the model know the first `rows` ids alone; how many it had beyond them.

    Large models of a family pad their embedding further than small ones. No tokenizer has those ids, and a
    smaller model could not even be asked what it thinks of one: a model without them never samples it, and
    its log-probs are those of what it can sample.
    """
    beyond = max(embedding_rows(model) - rows, 0)
    if beyond:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return beyond
