"""Tests that need a GPU: scripts/test.sh --gpu runs them, and writes their figures to docs/performance.md."""
