"""Rollouts over HTTP: `plan` decides what to ask for, `client` asks, `collector` waits for all of them."""
