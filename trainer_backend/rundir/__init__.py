"""A run on disk, and what a crash must not lose of it.

    job.toml, run.json      what it does, and its id
    lock, state.json        who trains it, and how far that is
    metrics.jsonl           a row an iteration, an evaluation
    ledger.jsonl            what each update has learned from
    run.log                 what was told of it
    rollouts/*.parquet      finished stages; *.spool.jsonl: what has come of one that is not
    checkpoints/, report/

Readers need no lock. Each write is whole or not there, and of those that belong together the last one counts:
a kill between any two leaves what the next start can go on from. Folders of versions that wrote fewer of
these files are read as they are, so run.json still says format 1.
"""
