"""Jobs as a service: their HTTP routes, their processes, and who restarts them."""
