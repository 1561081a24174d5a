"""Ranges of positive numbers drawn as bars on one logarithmic axis of whole decades."""

import locale
import math
import os
from collections.abc import Iterable

BAR = "├─●┤"  # from the smallest over the median to the largest
PLAIN_BAR = "|-o|"
PREFIXES = ("", "k", "M", "G", "T")


def terminal_draws(text: str) -> bool:
    """Whether the user's encoding holds `text`; stdout itself is UTF-8 always, by prepare_streams."""
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0] or locale.getpreferredencoding(False)
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def short(value: float) -> str:
    """Write a positive number in three digits: 0.73, 114, 12.3k, 1e+15."""
    rounded = float(f"{value:.3g}")
    thousands = int(math.log10(rounded) // 3) if 1000 <= rounded < math.inf else 0
    if thousands >= len(PREFIXES):
        return f"{value:.3g}"
    return f"{rounded / 1000**thousands:.3g}{PREFIXES[thousands]}"


class LogAxis:
    """An axis `width` characters wide, over the decades that hold every finite value of `values`."""

    def __init__(self, values: Iterable[float], width: int, plain: bool = False):
        logs = [math.log10(value) for value in values if 0 < value < math.inf]
        self.first = math.floor(min(logs, default=0))
        self.last = max(math.ceil(max(logs, default=0)), self.first + 1)
        self.width = width
        self._bar = PLAIN_BAR if plain else BAR

    def labels(self) -> str:
        """The axis' heading: decades written where they lie, as many as there is room for."""
        line = ""
        for exponent in range(self.first, self.last + 1):
            label = short(10.0**exponent)
            start = min(self._column(10.0**exponent), self.width - len(label))
            if not line or start > len(line):
                line = line.ljust(start) + label
        return line

    def bar(self, smallest: float, median: float, largest: float) -> str:
        """Draw one range; what lies past an end of the axis is drawn at that end, NaN not at all."""
        if math.isnan(smallest + median + largest):
            return ""
        left, line, middle, right = self._bar
        start, centre, end = (self._column(value) for value in (smallest, median, largest))
        cells = [left, *line * (end - start - 1), right] if end > start else [middle]
        cells[centre - start] = middle
        return " " * start + "".join(cells)

    def _column(self, value: float) -> int:
        if value <= 0:
            return 0
        if math.isinf(value):
            return self.width - 1
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return round(min(max(share, 0), 1) * (self.width - 1))
