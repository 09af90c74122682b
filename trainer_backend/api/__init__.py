"""The trainer as a service: jobs over HTTP. gate.py decides who may ask, posted.py what may be asked for."""
