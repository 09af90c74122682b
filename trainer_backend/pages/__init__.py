"""Pages about runs and jobs, from the store and the run directories; see docs/dashboard.md."""
