import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.model_folders import PADDING_ROWS
from trainer_backend.models.folder import (
    drop_rows_beyond,
    embedding_rows,
    fingerprint,
    load_model_folder,
    save_model_folder,
)


def two_layers(first: torch.Tensor, second: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.first, model.second = nn.Parameter(first), nn.Parameter(second)
    return model


def test_a_fingerprint_tells_values_names_shapes_and_types_apart():
    one, two = torch.arange(6.0), torch.ones(2)
    models = [
        two_layers(one, two),
        two_layers(two, one),
        two_layers(one.view(2, 3), two),
        two_layers(one.bfloat16(), two),
        two_layers(one + torch.tensor([0.0, 0, 0, 0, 0, 2**-21]), two),
    ]
    assert len({fingerprint(model) for model in models}) == len(models)
    assert fingerprint(models[0]) == fingerprint(two_layers(torch.arange(6.0), torch.ones(2)))


def test_a_buffer_that_is_saved_with_the_weights_is_one_of_them():
    def model(value: float, *, persistent: bool) -> nn.Module:
        made = two_layers(torch.ones(2), torch.ones(2))
        made.register_buffer("scale", torch.tensor(value), persistent=persistent)
        return made

    assert fingerprint(model(1.0, persistent=True)) != fingerprint(model(2.0, persistent=True))
    # made anew from the config, on each machine a little differently
    assert fingerprint(model(1.0, persistent=False)) == fingerprint(model(2.0, persistent=False))


def test_a_fingerprint_is_that_of_the_weights_and_not_of_their_files(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    model, tokenizer = load_model_folder(model_folders["qwen3"])
    save_model_folder(tmp_path / "again", model, tokenizer)
    assert fingerprint(load_model_folder(tmp_path / "again")[0]) == fingerprint(model)
    shutil.copytree(model_folders["qwen3"], tmp_path / "copy")
    assert fingerprint(load_model_folder(tmp_path / "copy")[0]) == fingerprint(model)


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # tied embedding, and not
def test_rows_that_are_dropped_change_no_logit_of_the_others(model_folders: Mapping[str, Path], family: str):
    model, _ = load_model_folder(model_folders[family])
    rows = embedding_rows(model)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        before = model(ids).logits
        assert drop_rows_beyond(model, rows - PADDING_ROWS) == PADDING_ROWS
        after = model(ids).logits
    assert embedding_rows(model) == after.shape[-1] == rows - PADDING_ROWS
    torch.testing.assert_close(after, before[..., : rows - PADDING_ROWS], rtol=0, atol=0)
    kept = rows - PADDING_ROWS
    assert (drop_rows_beyond(model, kept), drop_rows_beyond(model, rows)) == (0, 0)
    assert embedding_rows(model) == kept, "a smaller model keeps its rows"
