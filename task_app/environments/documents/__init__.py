"""Questions about long documents, which the model reads with tools; the prompt does not contain the text."""
