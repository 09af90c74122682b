"""The report of a run: one HTML file that works offline, its pictures beside it; see `write.write_report`."""
