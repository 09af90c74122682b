"""The dashboard's pages about runs and jobs, made from the store and run directories (docs/dashboard.md)."""
