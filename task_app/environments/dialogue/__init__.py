"""Dialogues: a prompt, answers in words, and an interaction that replies as the user."""
