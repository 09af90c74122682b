"""Other people's ways to speak to the same environments; each a thin layer, none with state of its own."""
