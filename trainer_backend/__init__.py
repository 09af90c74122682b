"""The trainer backend: jobs, rollouts over HTTP, credit, updates."""
