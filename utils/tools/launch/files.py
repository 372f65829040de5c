"""Check what the ranks of a host need before they start: the working folder, the same script."""

from __future__ import annotations

import os
import zlib


def problem_with(folder: str, script: str, checksum: int | None) -> str:
    """Enter the folder and check the script; return what is wrong with them, empty if nothing.

    script: its path, relative to the folder or absolute; empty where there is none.
    checksum: of the script on the host of launch.py.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        return f"the working folder {folder} cannot be entered ({error.strerror})"
    if not script:
        return ""
    found = checksum_of(script)
    if found is None:
        return f"there is no readable script {script} in {folder}"
    if checksum is not None and found != checksum:
        return f"the script {script} in {folder} differs from the one on the host of launch.py"
    return ""


def checksum_of(script: str) -> int | None:
    """Return the CRC-32 of a file; None where it cannot be read."""
    try:
        with open(script, "rb") as file:
            return zlib.crc32(file.read())
    except OSError:
        return None
