"""Tool-call syntaxes of model families: one pure file each, without tokenizer and template."""
