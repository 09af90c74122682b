"""The store: the jobs themselves, and an index of runs, in SQLite (WAL) or PostgreSQL through SQLAlchemy 2.

The files of a run directory decide, not the index. The index can be deleted; sync.py builds it again.
"""
