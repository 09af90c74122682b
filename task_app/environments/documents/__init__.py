"""Long documents that are read with tools: the text stands outside the prompt."""
