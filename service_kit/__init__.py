"""The HTTP edge of both services and the gateway: keys, limits, errors, logs, and the server."""
