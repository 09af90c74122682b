"""Rollouts over HTTP: what to ask for (plan), how to ask (client), until all is there (collector)."""
