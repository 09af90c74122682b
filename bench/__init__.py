"""Studies and measurements, each run as `python -m bench.NAME` from the root of the repository."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see trainer_backend.__main__
