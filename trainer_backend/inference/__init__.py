"""Serve a policy: the engine protocol, the local torch engine, and the OpenAI-compatible gateway."""
