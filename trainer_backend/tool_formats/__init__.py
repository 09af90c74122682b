"""Tool-call syntaxes of model families, pure: without tokenizer and template."""
