"""Code of the job TOML: its schema, the merging of files, its checks, and the page that lists its keys."""
