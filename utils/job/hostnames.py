"""Host names in full ("n1.pbs.lab") and without their domain ("n1")."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[0-9.]+|.*:.*")  # IPv4 or IPv6: what follows a dot is no domain


def short_name(host: str) -> str:
    """Return a host name in lower case and without its domain; an address stays whole."""
    host = host.lower()
    return host if _ADDRESS.fullmatch(host) else host.partition(".")[0]


def same_host(one: str, other: str) -> bool:
    """Whether two names mean one host: they are equal, or one of them lacks its domain."""
    one, other = one.lower(), other.lower()
    one_lacks_domain = "." not in one or "." not in other
    return one == other or (one_lacks_domain and short_name(one) == short_name(other))
