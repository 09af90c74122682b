"""Who starts the processes of a run, and where: [cluster] launcher."""
