"""Advantage estimators, one a file; `trainer_backend.plugins.ESTIMATORS` names them."""
