"""The store: the jobs themselves, and an index of runs, in SQLite (WAL) or PostgreSQL through SQLAlchemy 2.

The run directory is the truth about a run. The index can be deleted; sync.py builds it again.
"""
