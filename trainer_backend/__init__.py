"""The trainer backend: jobs, rollouts over HTTP, credit, updates."""

import os

# Before torch is imported anywhere. Beside another busy process OpenMP's spinning makes torch ten to a hundred
# times slower. Threads that sleep at once gain nothing from a second core, whose work comes in pieces of less
# than a millisecond: those that first look for it some 0.1 ms do, and lose a quarter where both cores are busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
