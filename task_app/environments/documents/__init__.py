"""Long documents that are read with tools: the text stays outside the prompt."""
