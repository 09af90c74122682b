"""Jobs as a service: HTTP routes, processes, and the supervisor that restarts them."""
