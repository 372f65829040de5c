"""Whether the ranks hang, and which rank is at fault. Loaded only for that.

hang_watch.py decides from heartbeats and positions whether they hang: a new kind of pause that is
no hang begins there. positions.py has where a rank is, ../inspection.py asks all ranks for it, and
hang_cause.py finds the cause in it and words it: a new kind of hang begins there, with a row in
tests/faults/hangs.py. collectives.py reads torch's record of collectives, worker_lines.py the
lines of DataLoader workers, and hang_report.py writes the files of a rank.
"""
