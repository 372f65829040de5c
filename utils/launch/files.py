"""What the ranks of a host need there before they start: the working folder and the script, the same as on the others.
"""
from __future__ import annotations

import os
import zlib
from contextlib import suppress


def problem_with(folder: str, script: str, checksum: int | None) -> str:
    """Enter the folder and compare the script with the first host's; what is wrong with them here, empty if nothing.

    script: its path, relative to the folder or absolute; empty where there is none to compare. checksum: the script's
    checksum_of() on the host of the launch.
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
        return f"the script {script} in {folder} is another one than on the host of launch.py"
    return ""


def checksum_of(script: str) -> int | None:
    """CRC-32 of a file; None where it cannot be read."""
    with suppress(OSError), open(script, "rb") as file:
        return zlib.crc32(file.read())
    return None
