"""The services beside a run: task apps, and the server of the policy."""
