"""Pages about runs and jobs, from what the store and the run directories hold; docs/dashboard.md."""
