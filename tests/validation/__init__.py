"""Predictions against measurements, on demand: they take minutes, and their tables are in docs/performance.md."""
