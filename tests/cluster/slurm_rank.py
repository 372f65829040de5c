"""A rank without torch, for tests that start many: it meets the others and says who and where it is.

Not here: the training scripts, which do the same through torch (examples/).
"""
from __future__ import annotations

import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.launchers import detect
from utils.rendezvous import agree

me = detect()
met = agree(me, {}, lambda cards: (None, [{} for _ in cards]), timeout=20) if me.world_size > 1 else None
for note in me.notes:
    sys.stderr.write(f"note: {note}\n")
sys.stdout.write(f"rank {me.rank} of {me.world_size}, local {me.local_rank} of {me.local_world_size}, on "
                 f"{socket.gethostname()}, by {me.launcher}, rank 0 at {met.master_addr if met else '-'}\n")
sys.stdout.flush()
