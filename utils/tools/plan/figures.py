"""Format numbers as the report and the page print them: few digits, units with prefixes.

page.html has the same functions in JavaScript, and prints the same digits.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal

MODEL_DIGITS = 2  # significant digits of times from the model of a step
EXACT_DIGITS = 3  # significant digits of exact values: memory, and bytes that are sent
_SMALL = (("1", ""), ("1e-3", "m"), ("1e-6", "µ"), ("1e-9", "n"))
_LARGE = (("1e12", "T"), ("1e9", "G"), ("1e6", "M"), ("1e3", "k"), ("1", ""))


def with_unit(value: float, unit: str, digits: int) -> str:
    """Return "17 ms" or "2.96 GB" with this number of digits; "0" below 1 ns or 1 B."""
    rounded, (scale, prefix) = _rounded(value, digits), _scale(value, unit, digits)
    return f"{_digits(rounded / scale)} {prefix}{unit}".rstrip() if scale else "0"


def seconds_range(value: float, low: float, high: float) -> str:
    """Return a predicted time and its range: "270 ms, 230 to 310"."""
    scale, _ = _scale(value, "s", MODEL_DIGITS)
    if not scale:
        return "0"
    ends = (_digits(_rounded(end, MODEL_DIGITS) / scale) for end in (low, high))
    return f"{seconds_text(value)}, {' to '.join(ends)}"


def _rounded(value: float, digits: int) -> Decimal:
    exact = Decimal(_without_rounding_errors(value))
    return exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), ROUND_HALF_UP)


def _scale(value: float, unit: str, digits: int) -> tuple[Decimal, str]:
    """Return the largest unit in which a number is at least 1; (0, "") if it prints as 0."""
    scales = [(Decimal(scale), prefix) for scale, prefix in (_SMALL if unit == "s" else _LARGE)]
    if value < float(scales[-1][0]):
        return Decimal(0), ""
    rounded = _rounded(value, digits)
    return next((entry for entry in scales if rounded >= entry[0]), scales[-1])


def _digits(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _without_rounding_errors(value: float) -> float:
    """Round to 12 digits: the page sums in another order, and must round a half the same way."""
    return float(f"{value:.12g}")


def seconds_text(value: float) -> str:
    """Return a predicted time."""
    return with_unit(value, "s", MODEL_DIGITS)


def bytes_text(value: float) -> str:
    """Return a size of memory, or of sent data."""
    return with_unit(value, "B", EXACT_DIGITS)


def percent(share: float) -> str:
    """Return whole percents; "over 99%" instead of 100, because no prediction is that exact."""
    whole = math.floor(100 * _without_rounding_errors(share) + 0.5)
    return "over 99%" if whole >= 100 else f"{whole}%" if whole else "under 1%"


def percentages(low: float, high: float) -> str:
    """Return "94% to 97%", or one number if both ends are the same."""
    text = " to ".join(dict.fromkeys(map(percent, (low, high))))
    return text.replace("99% to over 99%", "99% or more")


def efficiency_text(low: float, high: float, gpus: int) -> str:
    """Return the efficiency on this number of GPUs; "-" for one, the reference."""
    return percentages(low, high) if gpus > 1 else "-"


def gpus_text(gpus: int) -> str:
    """Return "1 GPU" or "8 GPUs"."""
    return f"{gpus} GPU{'s' * (gpus != 1)}"
