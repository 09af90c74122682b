"""The HTTP routes, a small file for each topic. They translate between HTTP and the rest of the task app."""
