"""Endpoints that a third-party agent uses as its model; each model call is recorded as a decision."""
