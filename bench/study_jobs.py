"""What do whole jobs learn? Each with several seeds, and each seed from its own imitation on.

    python -m bench.study_jobs demo [--quick] [--seeds 0 1 2] [--arms …] [--background]

    demo      configs/crafter_cpu.toml: ten minutes a seed on two quiet cores
    laptop    configs/crafter_laptop.toml, an hour a seed: view (the text shows what is in view) and
              memory (text and teacher know everything seen in the episode)
    babyai    configs/babyai.toml, minutes a seed
    sokoban   configs/sokoban.toml, a quarter of an hour a seed

What is done is skipped, what was interrupted is resumed. After each run bench/results/NAME.json (curves with
95 % intervals, the gain world by world, times, versions) and NAME.png are written again.
"""

import sys

from bench.study_results import Arm, Study
from bench.study_runs import main

_REMEMBERS = ("rollout.env_config.memory=true", "warmup.policy_config.memory=true")
_SOLVED = {"measure": "outcome_reward", "measured": "missions solved, held out"}
STUDIES = {
    study.name: study
    for study in (
        Study(
            name="demo",
            title="the demo, from its warm-up on",
            against="demo",
            settings=(),
            arms={"demo": Arm("the demo", ())},
            from_the_start=True,
        ),
        Study(
            name="laptop",
            title="whole games of Crafter, from what is in view or from everything seen",
            against="view",
            job="configs/crafter_laptop.toml",
            settings=(),
            arms={"view": Arm("the view alone", ()), "memory": Arm("with a memory", _REMEMBERS)},
            from_the_start=True,
        ),
        Study(
            name="babyai",
            title="BabyAI's GoToLocal, from its warm-up on",
            against="babyai",
            job="configs/babyai.toml",
            settings=(),
            arms={"babyai": Arm("BabyAI", ())},
            from_the_start=True,
            **_SOLVED,
        ),
        Study(
            name="sokoban",
            title="Sokoban, from its warm-up on",
            against="sokoban",
            job="configs/sokoban.toml",
            settings=(),
            arms={"sokoban": Arm("Sokoban", ())},
            from_the_start=True,
            **_SOLVED,
        ),
    )
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or [""]
    if name not in STUDIES:
        raise SystemExit(f"the study is {name!r}; known: {', '.join(STUDIES)}")
    sys.exit(main(STUDIES[name], arguments))
