"""The health check of both images, `python -IS health.py PORT`: it imports little, since it runs often."""

import socket
import sys

with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=8) as connection:
    connection.sendall(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    status = connection.makefile("rb").readline().split()
sys.exit(status[1:2] != [b"200"])
