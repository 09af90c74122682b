"""Data sets: reads rows from files and folders, and splits them into training and held-out rows."""
