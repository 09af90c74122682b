"""The store: the jobs themselves, and an index of runs, in SQLite (WAL) or PostgreSQL through SQLAlchemy 2.

If the index and the files of a run directory differ, the files are right. sync.py rebuilds a deleted index.
"""
