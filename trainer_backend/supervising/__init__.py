"""Jobs and their processes: which runs when, what becomes of one that ends, what others see of it.

The store is the truth of jobs, the run directory that of a run; what is held here is lost with the service,
and the next one goes on from those two.
"""
