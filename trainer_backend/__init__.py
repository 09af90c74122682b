"""The trainer backend: jobs, rollouts over HTTP, credit, updates."""

import os

# Before torch is imported anywhere: with another busy process beside it, OpenMP's spinning makes torch ten
# to a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
