"""Slurm: node lists, allocations, and jobs."""

from __future__ import annotations

from .hostlist import expand_hostlist as expand_hostlist
