"""The job TOML: its tables, their layers, its checks, and the page that documents its keys."""
