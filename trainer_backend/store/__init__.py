"""The truth of jobs, and an index of runs: SQLAlchemy 2 over SQLite (WAL) or PostgreSQL.

What a run is, stands in its run directory; what is here of it can be deleted and synced again (sync.py).
"""
