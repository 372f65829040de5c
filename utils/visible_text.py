"""Show text that the kit did not write: what a terminal would obey is shown as its code."""

from __future__ import annotations

import re

# Control characters of ASCII and of ISO 8859-1 but tab and newline; separators of lines; what turns
# the direction of writing; and bytes that are no UTF-8 (PEP 383).
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str, *, one_line: bool = False) -> str:
    r"""Return a text in which a terminal finds nothing to obey: "\x1b[2J" -> r"\x1b[2J".

    Such characters set the title of a window, clear the screen or fill the clipboard of whoever
    reads a log. one_line: tabs and newlines are shown as codes, too, as in a cell of a table.
    """
    text = _OBEYED.sub(_code, text)
    return text.replace("\t", r"\t").replace("\n", r"\n") if one_line else text


def _code(match: re.Match[str]) -> str:
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # stands for a byte
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
