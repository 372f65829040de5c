"""Checkpoints that are always complete or absent, and resume bit-identically.

What Checkpointer.save() does, and what it writes, in this order:

1. Copy: pack.py takes the state apart into a plain tree and tensors, of a sharded tensor this
   rank's slice (slices.py). snapshot.py copies the tensors into preallocated memory. Then save()
   returns; a background thread does the rest (save.py).
2. Rank 0, which has locked the folder (lock.py), makes .saving-.../ in it (folder.py: begin).
3. Each rank writes rank-00000.safetensors, rank-00001.safetensors, ... into it, and syncs its file
   and the folder (rank_file.py, which also computes the checksums meanwhile).
4. Each rank reports the size and the checksums of its file to rank 0 (../coordination.py).
5. Rank 0 writes manifest.json with all these reports, and syncs it and the folder (folder.py:
   commit).
6. Rank 0 renames the folder to step-000001200/ and syncs the parent folder. Now the checkpoint is
   safe, and readers see it.
7. Rank 0 deletes old checkpoints: it renames each to .deleting-.../ first (folder.py: delete_old).

A load (load.py, restore.py) checks the manifest and all checksums before it changes the state, and
renames a checkpoint that two ranks find damaged to step-000001200.damaged/. format.py defines
manifest and header.

Three files touch the disk: folder.py (names, manifests, commit), rank_file.py (tensors) and disk.py
(writes, and what their errors mean). Another kind of storage would replace these.
"""

from __future__ import annotations

from .checkpointer import Checkpointer as Checkpointer
from .entries import PerRank as PerRank
from .load import CheckpointError as CheckpointError
from .load import Restored as Restored
from .reader import export_safetensors as export_safetensors
from .reader import list_steps as list_steps
from .reader import load_part as load_part
