"""The trainer backend: jobs, rollouts over HTTP, credit, updates."""

import os

# Set before torch is imported anywhere. Next to another busy process OpenMP's spinning makes torch ten to a
# hundred times slower. Threads that sleep at once make a second core useless, because the work comes in
# pieces of under a millisecond. Threads that first spin for some 0.1 ms do use a second core, and cost a
# quarter of the time where both cores are busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if os.environ["OMP_WAIT_POLICY"].upper() == "PASSIVE":  # otherwise the user has chosen how threads wait
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
