"""While ranks run: who left, died, is lost or hangs, and what a launch reports."""
