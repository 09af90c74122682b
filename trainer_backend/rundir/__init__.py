"""The directory of a run: its files, and how they survive a crash.

    job.toml, run.json      the job, and the id of the run
    lock, state.json        the process that trains it, and its progress
    metrics.jsonl           one row per iteration and per evaluation
    ledger.jsonl            the rollouts that each update learned from
    run.log                 the messages shown to the user
    rollouts/*.parquet      finished stages; *.spool.jsonl: the finished rollouts of an unfinished stage
    checkpoints/, report/

Readers need no lock. Each write is atomic. The last write of a series commits the series, so after a kill
between two writes the next start can continue. Earlier versions wrote fewer of these files. Their directories
are still readable, so the format in run.json is still 1.
"""
