"""Code that both services and the gateway share: HTTP server, keys, limits, errors, logs, child processes."""
