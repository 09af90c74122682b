"""What crosses the wire between the two services. Pydantic and the standard library only."""
