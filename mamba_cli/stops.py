"""Stop strings in text that arrives in parts."""

from collections.abc import Sequence

from mamba_cli.errors import Mamba2Error


class StopStrings:
    """Cuts a text right before the stop string that is complete first.

    Of several that end at the same character the longest counts. What may be the beginning of a stop
    string is held back, so the result does not depend on how the text was split into parts.
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise Mamba2Error("stop: expected a string of at least one character, got an empty one")
        self.found = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next part and return the text that no stop string can cut any more."""
        if self.found:
            return ""
        text = self._held + text
        matches = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if matches:
            self.found = True
            self._held = ""
            return text[: min((begin + len(stop), begin) for begin, stop in matches)[1]]
        begin = len(text) - self._possible_beginning(text)
        self._held = text[begin:]
        return text[:begin]

    def finish(self) -> str:
        """Return what was held back: no more text will come."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Return the length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
