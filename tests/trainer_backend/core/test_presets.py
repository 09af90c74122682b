"""The shapes of models that are trained from scratch."""

import pytest

from trainer_backend.core.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_the_heads_are_as_wide_together_as_the_model(name: str):
    preset = PRESETS[name]
    assert preset.heads * preset.head_dim == preset.width
