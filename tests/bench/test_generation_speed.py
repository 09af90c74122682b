"""A ratio that misses its target fails the script."""

import pytest

from bench import generation_speed


@pytest.mark.parametrize(
    ("generate", "generate_batch", "met"), [(1.1, 5.0, True), (1.09, 50.0, False), (3.0, 4.9, False)]
)
def test_the_engine_must_reach_both_of_its_ratios(
    generate: float, generate_batch: float, met: bool, capsys: pytest.CaptureFixture[str]
):
    ratios = {"generate": generate, "generate_batch": generate_batch}
    assert generation_speed.targets_met(ratios, generation_speed.BATCH_TARGETS) is met
    assert ("TOO SLOW" in capsys.readouterr().out) is not met
