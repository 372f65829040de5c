"""Find out whether the ranks hang, and which rank is at fault. Loaded only when needed.

hang_watch.py decides from heartbeats and positions whether the ranks hang; start there for a new
kind of pause that is no hang. positions.py says where a rank is, and ../inspection.py asks all
ranks for it. hang_cause.py finds the cause and words it; start there for a new kind of hang, with a
row in tests/faults/hangs.py. collectives.py reads torch's record of collectives, worker_lines.py
the lines of DataLoader workers, and hang_report.py writes the files of a rank.
"""
