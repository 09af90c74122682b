"""Captured endpoints: a third-party agent asks its model here, and each call becomes a decision."""
