"""How families of models write tool calls: a file each, pure, with no tokenizer and no template."""
