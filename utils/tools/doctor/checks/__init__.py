"""The checks of `doctor`, one subject per file."""
