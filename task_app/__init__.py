"""The task app: environments behind HTTP, episodes, decision rewards. No torch, no tokenizer, no database."""
