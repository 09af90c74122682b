"""The HTTP routes, a small file a topic. They translate; what decides is elsewhere."""
