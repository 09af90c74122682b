"""Observes episodes: counters, traces, and replays that give pictures and snapshots."""
