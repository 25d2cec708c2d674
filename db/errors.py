"""What can go wrong with a store, each with a hint where something can be done.

StoreError
├── StoreUnavailable   the place: URL, path, permissions, file system, database server
├── NotAStore          a file, but not one of ours
├── StoreOutdated      opened for reading, an upgrade is due
├── StoreTooNew        written by a newer Weighbridge
├── StoreBusy          another process held the write lock for too long
├── MigrationFailed    an upgrade was taken back; the file is as it was
├── RecordRefused      values that must not be recorded
├── RunRefused         a run that is not there, is closed, or belongs to another process
├── NoSuchDocument     an id that no record has
├── BackupFailed       a copy that could not be made, or must not replace what is there
├── QueryRefused       typed SQL that cannot be run
└── ExportRefused      a file that answers cannot be written to
"""


class StoreError(Exception):
    """A store could not do what was asked.

    `str()` gives `message` alone; `hint` says what to do about it.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class StoreUnavailable(StoreError):  # noqa: N818 - named for what the reader sees
    """The place a URL names cannot hold, or be read as, a store."""


class NotAStore(StoreError):  # noqa: N818
    """The file exists and is something else."""


class StoreOutdated(StoreError):  # noqa: N818
    """The store is older than this Weighbridge, and readers never change it."""


class StoreTooNew(StoreError):  # noqa: N818
    """A newer Weighbridge has upgraded the store."""


class StoreBusy(StoreError):  # noqa: N818
    """The write lock could not be had within the busy timeout."""


class MigrationFailed(StoreError):  # noqa: N818
    """An upgrade failed and was rolled back."""


class NoSuchDocument(StoreError):  # noqa: N818
    """No record of the store has the id."""


class BackupFailed(StoreError):  # noqa: N818
    """A backup could not be written, or must not be written there."""


class RecordRefused(StoreError):  # noqa: N818
    """Values that would break what the store promises."""


class RunRefused(StoreError):  # noqa: N818
    """A run that cannot be begun, continued or written to."""


class QueryRefused(StoreError):  # noqa: N818
    """Typed SQL that is not a single reading statement, or does not run."""


class ExportRefused(StoreError):  # noqa: N818
    """A file that answers cannot be written to."""
