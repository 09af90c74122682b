"""Interactions: simulated users, which score each answer of the model, reply to it, and may end the episode.

`config_file` reads the operator's file and makes an `InteractionEntry` for each interaction in it. For each
episode, `service.Interactions` makes a `live.LiveInteraction`, which builds one interaction object and calls
its methods.

Source: 5-interactions.md; DESIGN.md 4.11.
"""
