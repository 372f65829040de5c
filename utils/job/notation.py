"""Host names, durations and sizes as Slurm, PBS and the jobs of ddpkit submit write them."""

from __future__ import annotations

import re

STOP_FILE = "DDPKIT_STOP_FILE"  # set in jobs of ddpkit submit; `submit stop` touches the file


_ADDRESS = re.compile(r"[0-9.]+|.*:.*")  # IPv4 or IPv6, where a dot begins no domain


def short_name(host: str) -> str:
    """Return a host name in lower case and without its domain; an address stays whole."""
    host = host.lower()
    return host if _ADDRESS.fullmatch(host) else host.partition(".")[0]


def same_host(host: str, other: str) -> bool:
    """Whether two names mean the same host: they are equal, or one lacks its domain."""
    host, other = host.lower(), other.lower()
    lacks_domain = "." not in host or "." not in other
    return host == other or (lacks_domain and short_name(host) == short_name(other))


# "1-12:30:15", "1-12" (days-hours); "120:00:00"; "30:00" (minutes:seconds); "90"
_CLOCK = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,9})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_AMOUNT = r"([0-9]{1,8}(?:\.[0-9]{1,4})?)"
_WORDS = re.compile(  # "1h30m", "1.5 hours", "2d 12h"
    rf"(?:{_AMOUNT} *d(?:ays?)?)? *(?:{_AMOUNT} *h(?:(?:ou)?rs?)?)? *"
    rf"(?:{_AMOUNT} *m(?:in(?:ute)?s?)?)? *(?:{_AMOUNT} *s(?:ec(?:ond)?s?)?)?",
    re.IGNORECASE,
)
_WORD_SECONDS = (86400, 3600, 60, 1)
_SIZE = re.compile(r"([0-9]{1,18})([kmgtp]?)b?", re.IGNORECASE)


def parse_duration(text: str, *, plain_number_seconds: int = 60) -> int | None:
    """Return the seconds of a duration such as "2:00:00", "30:00", "1-12:00:00", "90" or "1h30m".

    plain_number_seconds: the unit of a number alone, 60 in Slurm, 1 in PBS.
    None for any other text, such as Slurm's UNLIMITED, NOT_SET and INVALID.
    """
    text = text.strip()
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        days = int(clock[1] or 0)
        fields = [int(field) for field in clock.groups()[1:] if field is not None]
        if clock[1] is not None:  # days-hours, then perhaps minutes and seconds
            fields += [0] * (3 - len(fields))
        elif len(fields) == 1:
            return fields[0] * plain_number_seconds
        else:  # minutes:seconds, or hours:minutes:seconds
            fields = [0] * (3 - len(fields)) + fields
        hours, minutes, seconds = fields
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    words = _WORDS.fullmatch(text) if text else None
    if words is None:
        return None
    amounts = zip(words.groups(), _WORD_SECONDS, strict=True)
    return round(sum(float(amount or 0) * seconds for amount, seconds in amounts))


def format_walltime(seconds: int) -> str:
    """Return 7200 as "02:00:00", which both schedulers read."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as "64G", "24684096kb" or "512"; None for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    exponent = " kmgtp".index(match[2].lower() or " ")
    return int(match[1]) << (10 * exponent)


def parse_number(text: str, *, signed: bool = False) -> int | None:
    """Return a whole number; None for any other text. signed: also accept "-29"."""
    text = text.strip()
    digits = text.removeprefix("-") if signed else text
    return int(text) if re.fullmatch("[0-9]{1,18}", digits) else None
