"""How the process of a job says how it ended (running/job_process.py says it, supervising/ hears it)."""

# Begins the last line of one that ended with an error.
ERROR = "error: "

DONE = 0
# An error of ours that another start may find mended: a task app that was away, a port that was taken.
FAILED = 1
# The job itself cannot be run so: another start would end the same.
REFUSED = 2
# Somebody asked it to stop; what is finished is saved.
STOPPED = 3
