"""The one exception type that a user of the toolkit is meant to read."""


class Mamba2Error(Exception):
    """A failure whose cause the user can act on.

    message: one line, `<what>: expected X, got Y`; hint: the next step, where there is one.
    The command line prints both without a traceback and exits with 1.
    """

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
