"""Interactions: objects that answer the model as its user, score every answer, and may end the episode.

`config_file` reads the operator's file into `InteractionEntry`s, `service.Interactions` opens one for an
episode, and `live.LiveInteraction` runs it.

Source: 5-interactions.md; DESIGN.md 4.11.
"""
