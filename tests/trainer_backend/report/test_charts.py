import pytest
from matplotlib.figure import Figure

from tests.conftest import tiny_job
from tests.trainer_backend.report.hand_made import iteration_row, small_run
from trainer_backend.report.charts import from_zero, seconds
from trainer_backend.report.story import read_story
from trainer_backend.report.training_charts import time_per_stage


@pytest.mark.parametrize("values", [[1.5, 1.5], [0.5, 0.4, 0.5], [0.0, 0.0], [-2.0, 1.0], [-3.0, -1.0], []])
def test_zero_and_every_value_are_shown_with_air_to_the_frame(values):
    axes = Figure().subplots()
    axes.plot(range(len(values)), values)
    from_zero(axes)
    low, high = axes.get_ylim()
    height = high - low
    shown = [0.0, *values]
    assert min(shown) - low > 0.02 * height
    assert high - max(shown) > 0.05 * height


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0.0 s"), (0.004, "under 0.1 s"), (0.1, "0.1 s"), (2.46, "2.5 s"), (9.94, "9.9 s"),
        (9.96, "10 s"), (48.2, "48 s"), (12345.0, "12345 s"),
    ],
)  # fmt: skip
def test_a_stage_that_took_time_is_never_told_to_have_taken_none(value, told):
    assert seconds(value) == told


def test_a_tiny_stage_is_in_the_words_of_the_picture(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    run.append_metrics({**iteration_row(3, 1.0), "time/publish_s": 0.004})
    chart = time_per_stage(read_story(run))
    assert chart is not None
    assert "RL: publish under 0.1 s" in chart.alt
