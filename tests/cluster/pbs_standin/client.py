"""A PBS command as the hosts have it: client.py SOCKET NAME [words...]. The server does the work (commands.py)."""
import json
import os
import socket
import sys

path, name, *words = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(path)
    socket.send_fds(connection, [b"\n"], [1, 2])
    connection.sendall(json.dumps([name, words, dict(os.environ)]).encode() + b"\n")
    sys.exit(int(connection.makefile().read() or 1))
