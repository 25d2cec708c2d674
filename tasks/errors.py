"""The errors of the task library: one tree. A leaf.

TaskError
├── SettingsError   a setting does not hold what it must
├── SourceError     a file cannot be read as records at all
└── ResultRefused   answers that do not belong to the run they were given to
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


class ResultRefused(TaskError):  # noqa: N818 - named for what happened to it
    """Answers that do not belong to the run they were given to."""
