"""Questions about long documents. No prompt contains the document, so the model reads it with tools."""
