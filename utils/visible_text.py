"""Show text from other programs: characters that a terminal would obey are shown as codes."""

from __future__ import annotations

import re

# Control characters of ASCII and ISO 8859-1, except tab and newline; line separators; characters
# that change the direction of writing; and bytes that are not UTF-8 (PEP 383).
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str, *, one_line: bool = False) -> str:
    r"""Return a text without characters that a terminal obeys: "\x1b[2J" -> r"\x1b[2J".

    Such characters set a window's title, clear the screen or fill the clipboard of the person who
    reads a log. one_line: also show tabs and newlines as codes, for a cell of a table.
    """
    text = _OBEYED.sub(_code, text)
    return text.replace("\t", r"\t").replace("\n", r"\n") if one_line else text


def _code(match: re.Match[str]) -> str:
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # a surrogate that stands for a byte
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
