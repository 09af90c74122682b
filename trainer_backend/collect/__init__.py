"""Rollouts over HTTP: `plan` decides what to ask for, `client` asks, `dispatcher` waits for all of them."""
