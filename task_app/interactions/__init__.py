"""Interactions: objects that answer the model as its user, score every answer, and may end the episode.

`config_file` reads the operator's file into `InteractionEntry`s. For each episode `service.Interactions`
opens the interaction of an entry as a `live.LiveInteraction`, which runs it.

Source: 5-interactions.md; DESIGN.md 4.11.
"""
