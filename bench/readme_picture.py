"""The README's picture: the five runs of the demo, from bench/results/demo.json.

    python -m bench.readme_picture

Writes docs/img/demo-learns.png. Thin lines are the training games of each seed, the thick line their mean.
Points are the mean of the evaluations on 100 held-out worlds, with bars from the lowest to the highest seed.
"""

import json
import statistics
import sys

from matplotlib.figure import Figure

from bench import kit
from bench.study_results import COLOURS, png, whole_numbers

PICTURE = kit.ROOT / "docs/img/demo-learns.png"


def draw(figure: Figure) -> None:
    """Draw training games and evaluations in one chart."""
    text = (kit.ROOT / "bench/results/demo.json").read_text(encoding="utf-8")
    runs = json.loads(text)["arms"]["demo"].values()
    axes = figure.add_subplot()
    training = [[row["unique_achievements"] for row in run["training"]] for run in runs]
    iterations = range(1, len(training[0]) + 1)
    for values in training:
        axes.plot(iterations, values, color=COLOURS[0], alpha=0.25, linewidth=0.8)
    means = [statistics.fmean(values) for values in zip(*training, strict=True)]
    label = "training games from the beginning, mean of five seeds (thin: each seed)"
    axes.plot(iterations, means, color=COLOURS[0], label=label)
    columns = list(zip(*(run["evaluations"] for run in runs), strict=True))
    found = [[item["unique_achievements"] for item in column] for column in columns]
    held_out = [statistics.fmean(values) for values in found]
    below = [mean - min(values) for mean, values in zip(held_out, found, strict=True)]
    above = [max(values) - mean for mean, values in zip(held_out, found, strict=True)]
    axes.errorbar(
        [column[0]["iteration"] for column in columns], held_out, yerr=[below, above], color=COLOURS[1],
        marker="o", capsize=4, label="held-out worlds, mean (bars: smallest and largest seed)",
    )  # fmt: skip
    axes.set(xlabel="iterations of 16 games, from random weights on", ylabel="unique achievements a game")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.legend(loc="lower right")


def main() -> int:
    PICTURE.write_bytes(png(draw, height_in=3.0))
    return kit.report(f"{PICTURE.relative_to(kit.ROOT)} is written", True)


if __name__ == "__main__":
    sys.exit(main())
