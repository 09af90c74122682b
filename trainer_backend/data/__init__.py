"""Data sets: the rows of files and folders, and which of them are held out."""
