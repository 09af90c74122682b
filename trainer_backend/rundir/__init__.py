"""A run on disk: job.toml, metrics.jsonl, rollouts/, checkpoints/, report/. What a crash must not lose."""
