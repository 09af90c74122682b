"""Serves the environments under the APIs of other projects: OpenEnv, Gymnasium, older Crafter task apps."""
