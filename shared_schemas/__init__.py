"""Data types that the trainer and the task app exchange. Imports only pydantic and the standard library."""
