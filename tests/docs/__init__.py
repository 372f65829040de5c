"""Tests of docs/guide: every command of its pages runs, and its output has the shape that the page shows."""
