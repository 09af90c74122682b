"""Rollouts over HTTP: `plan` makes the requests, `client` sends them, `dispatcher` collects the results."""
