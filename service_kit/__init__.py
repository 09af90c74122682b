"""The HTTP edge of both services and of the gateway: keys, bounds, errors, logs, the server itself."""
