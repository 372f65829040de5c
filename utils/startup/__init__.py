"""Find rank 0 and agree with all ranks before torch starts. Standard library only, no torch."""

from __future__ import annotations

from .address import Rendezvous as Rendezvous
from .address import agree as agree
