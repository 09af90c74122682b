"""A ratio that misses its target fails the script."""

import pytest

from tests.bench.scripts import python


@pytest.mark.parametrize(
    ("generate", "generate_batch", "met"), [(1.1, 5.0, True), (1.09, 50.0, False), (3.0, 4.9, False)]
)
def test_the_engine_must_reach_both_of_its_ratios(generate: float, generate_batch: float, met: bool):
    code = (
        "import generation_speed, sys\n"
        f"ratios = {{'generate': {generate}, 'generate_batch': {generate_batch}}}\n"
        "sys.exit(not generation_speed.targets_met(ratios))"
    )
    done = python("-c", code)
    assert bool(done.returncode) is not met
    assert ("TOO SLOW" in done.stdout) is not met
