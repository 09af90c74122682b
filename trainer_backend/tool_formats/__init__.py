"""Parsers of the tool-call syntaxes of model families. They need only text, no tokenizer or chat template."""
