"""A place for a store is refused before anything is created there."""

from pathlib import Path

import pytest

from weighbridge.db import NotAStore, StoreUnavailable, open_engine, sqlite_url
from weighbridge.db.place import require_place


def test_a_new_store_and_one_that_is_there_may_be(tmp_path: Path):
    url = sqlite_url(tmp_path / "new" / "folder" / "store.db")
    require_place(url)
    assert not (tmp_path / "new").exists()
    open_engine(url).dispose()
    require_place(url)
    # A server answers for itself, when it is opened.
    require_place("postgresql://host/answers")


@pytest.mark.parametrize("name", ["", "file.txt/store.db", "loop", "x" * 300])
def test_a_path_that_cannot_be_is_refused(name: str, tmp_path: Path):
    (tmp_path / "file.txt").write_text("no database")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreUnavailable):
        require_place(sqlite_url(tmp_path / name))


def test_another_kind_of_file_is_refused(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("no database, but some text that is long enough to be looked at " * 20)
    with pytest.raises(NotAStore):
        require_place(sqlite_url(path))
    assert path.read_text().startswith("no database")
