"""Start ranks from copies of their packages on each node: `ddpkit launch --stage`.

packages.py lists what is staged, archive.py packs it, distribute.py brings the archive to the
nodes, node_copy.py keeps the copy of a node, and start.py becomes the program of a rank there. Only
the standard library is used: the last two run by a Python without site-packages.
"""
