"""The task app: environments behind HTTP, episodes, decision rewards. It needs no torch and no tokenizer."""
