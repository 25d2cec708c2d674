"""The error of this layer."""


class CommandError(Exception):
    """A flow cannot be started as asked, for a reason that no other layer knows.

    Attributes:
        message: The sentence for the reader; also `str(error)`.
        hint: What to do about it, or None when the message already says so.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
