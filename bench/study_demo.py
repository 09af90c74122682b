"""What does the demo learn? Its job (configs/crafter_cpu.toml) with several seeds, each from its own warm-up.

    python -m bench.study_demo [--quick] [--seeds 0 1 2] [--background]

What is done is skipped, what was interrupted is resumed. After each seed bench/results/demo.json (curves with
95 % intervals, the gain world by world, times, versions) and demo.png are written again.
"""

import sys

from bench.study_results import Arm, Study
from bench.study_runs import main

STUDY = Study(
    name="demo",
    title="the demo, from its warm-up on",
    against="demo",
    settings=(),
    arms={"demo": Arm("the demo", ())},
    from_the_start=True,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
