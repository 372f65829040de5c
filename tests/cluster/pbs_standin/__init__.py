"""A stand-in for OpenPBS 23.06: what its commands, messages and jobs do in tests/recordings/pbs, and nothing more.

server.py keeps the jobs, mom.py starts processes on a host, client.py holds the commands.
"""
