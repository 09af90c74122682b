"""Advantage estimators, one per file; `trainer_backend.plugins.ESTIMATORS` lists them."""
