"""Tool-call syntaxes of model families. Pure functions of text: no tokenizer, no chat template."""
