"""Stored rollouts as rows of messages for other trainers: JSONL, Parquet, or a folder for `datasets`."""
