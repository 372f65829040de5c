"""A stand-in for OpenPBS 23.06: of what tests/recordings/pbs holds, the part that the kit and its tests use.

server.py keeps and runs the jobs, in the process of the tests. client.py is what runs on the hosts as qsub, qstat and
so on: it passes its words, environment and open files to the server, where commands.py does the work.
"""
