"""Studies and measurements, each run as `python -m bench.NAME` from the root of the repository."""

import trainer_backend  # noqa: F401  # before torch, because it sets how torch's threads wait
