"""State as bytes: the envelope, whole sessions in it, what is held, what starts from it."""
