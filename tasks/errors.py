"""The errors of what tasks read: settings and documents. A leaf.

TaskError
├── SettingsError   a setting does not hold what it must
└── SourceError     a file cannot be read as records at all
"""


class TaskError(Exception):
    """What must hold and what came instead.

    Attributes:
        message: The sentence for the reader; also `str(error)`.
        hint: What to do about it, or None when the message already says so.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class SettingsError(TaskError):
    """A setting does not hold what it must."""


class SourceError(TaskError):
    """A file cannot be read as records at all."""
