"""Settings: one precedence, a known origin for each value, errors that name the place."""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from weighbridge.tasks.settings import (
    SettingsError,
    as_database_url,
    load_settings,
    unknown_variables,
    user_folder,
)


class Place(NamedTuple):
    home: Path
    project: Path
    user: Path


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty home and an empty current folder; gives both config files."""
    import os

    for name in list(os.environ):
        if name.startswith(("WEIGHBRIDGE_", "XDG_")):
            monkeypatch.delenv(name)
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.chdir(work)
    user = home / ".config" / "weighbridge" / "config.toml"
    user.parent.mkdir(parents=True)
    return Place(home, work / "weighbridge.toml", user)


def test_defaults_lie_in_the_users_folders(place: Place):
    settings = load_settings()
    data = place.home / ".local/share/weighbridge/weighbridge.db"
    assert settings.database_url == f"sqlite:///{data}"
    assert settings.cache == place.home / ".cache/weighbridge"
    assert settings.checkpoint is None
    assert settings.allow_remote_api is False
    assert {each["origin"] for each in settings.described().values()} == {"default"}


def test_each_layer_beats_the_next(place: Place, monkeypatch: pytest.MonkeyPatch):
    def loaded(option: str | None = None) -> tuple[str | None, str]:
        settings = load_settings(checkpoint=option)
        return settings.checkpoint, settings.origin("checkpoint")

    # From the weakest layer up: each one hides those before it.
    assert loaded() == (None, "default")
    place.user.write_text('checkpoint = "of-user"')
    assert loaded() == ("of-user", str(place.user))
    place.project.write_text('checkpoint = "of-project"')
    assert loaded() == ("of-project", str(place.project))
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", "of-environment")
    assert loaded() == ("of-environment", "WEIGHBRIDGE_CHECKPOINT")
    assert loaded("of-option") == ("of-option", "option")


def test_layers_mix_by_key(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.user.write_text("allow_remote_api = true")
    place.project.write_text('cache = "/var/cache/wb"')
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", "sqlite:////srv/a.db")
    settings = load_settings()
    assert settings.allow_remote_api is True
    assert settings.cache == Path("/var/cache/wb")
    assert settings.database_url == "sqlite:////srv/a.db"
    assert settings.origin("cache") == str(place.project)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", "")
    assert load_settings().origin("checkpoint") == "default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('checkpoint = "a', "must be TOML"),
        ('\xff = "a"', "must be TOML"),
        ('databse_url = "a"', 'got "databse_url"'),
        ("[database]\nurl = 1", 'got "database"'),
        ("database_url = 5", "must be a database URL such as"),
        ('database_url = " "', 'got " "'),
        ("checkpoint = true", "must be a checkpoint folder or a hub id, got true"),
        ('checkpoint = ""', "must be a checkpoint folder"),
        ("cache = 1", "must be a folder, got 1"),
        ('cache = "~nobody-of-that-name/x"', "must be a folder"),
        ('allow_remote_api = "perhaps"', 'must be true or false, got "perhaps"'),
        # Whatever holds a URL may hold a password.
        ('database_url = ["postgresql://u:p@h/db"]', "path of a SQLite file, got a URL"),
    ],
)
def test_a_bad_file_is_named_with_what_must_hold(place: Place, text: str, words: str):
    place.project.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(place.project) in caught.value.message
    assert words in caught.value.message


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEIGHBRIDGE_ALLOW_REMOTE_API", "perhaps")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert caught.value.message == (
        'WEIGHBRIDGE_ALLOW_REMOTE_API must be true or false, got "perhaps"'
    )


def test_a_config_file_that_cannot_be_read_is_named(place: Place):
    place.project.mkdir()
    with pytest.raises(SettingsError, match="must be a readable file"):
        load_settings()


def test_variables_without_a_setting_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEIGHBRIDGE_DATABSE_URL", "x")
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", "/x")
    assert unknown_variables() == ["WEIGHBRIDGE_DATABSE_URL"]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/srv/a.db", "sqlite:////srv/a.db"),
        ("a.db", "sqlite:///{cwd}/a.db"),
        ("~/a.db", "sqlite:///{home}/a.db"),
        ("sqlite:///a.db", "sqlite:///{cwd}/a.db"),
        ("sqlite:////srv/a.db", "sqlite:////srv/a.db"),
        # In a URL a question mark starts the query; in the name of a file it is a letter.
        ("/srv/a?b.db", "sqlite:////srv/a%3Fb.db"),
        ("sqlite:////srv/a%3Fb.db", "sqlite:////srv/a%3Fb.db"),
        ("postgresql://me@host/wb", "postgresql://me@host/wb"),
    ],
)
def test_paths_become_absolute_urls(place: Place, given: str, url: str):
    expected = url.format(cwd=Path.cwd(), home=place.home)
    assert as_database_url(given) == expected
    assert as_database_url(expected) == expected


def test_a_path_with_odd_letters_reaches_sqlite_unchanged():
    from weighbridge.db.location import store_path

    for name in ("/srv/a?b#c.db", "/srv/50% ü.db", "/srv/%41.db", "/srv/a b&c+d.db"):
        assert store_path(as_database_url(name)) == Path(name)
        assert store_path(as_database_url(as_database_url(name))) == Path(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////srv/a.db", "sqlite:////srv/a.db"),
        ("postgresql://me:s3cret@host/wb", "postgresql://me:***@host/wb"),
        ("postgresql://me:s3%40cret@host/wb", "postgresql://me:***@host/wb"),
        # What a driver calls its secrets is not known, so no parameter is shown.
        ("postgresql://host/wb?sslmode=on&password=s3cret", "postgresql://host/wb"),
        ("postgresql://host/wb?sslpassword=s3cret", "postgresql://host/wb"),
        # Here the rest of the password looks like the host, the name or the parameters.
        ("postgresql://me:p@s3cret@host/wb", "(not shown: "),
        ("postgresql://me:p@a/s3cret@host/wb", "(not shown: "),
        ("postgresql://me:p@a?s3cret@host/wb", "(not shown: "),
        ("://me:s3cret@host", "(not shown: "),
        ("postgresql://me:s3cret@host:port/wb", "(not shown: "),
    ],
)
def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch, url: str, shown: str):
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", url)
    settings = load_settings()
    assert settings.database_url == url
    described = settings.described()["database_url"]["value"]
    assert described.startswith(shown)
    assert described == shown or "not shown" in shown
    assert "s3cret" not in str(settings.described())


def test_folders_on_macos_and_with_xdg_variables(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert user_folder("data") == Path("/xdg/data/weighbridge")
    assert user_folder("cache") == place.home / ".cache/weighbridge"
    monkeypatch.setattr(sys, "platform", "darwin")
    library = place.home / "Library"
    assert user_folder("data") == library / "Application Support/weighbridge"
    assert user_folder("config") == library / "Application Support/weighbridge"
    assert user_folder("cache") == library / "Caches/weighbridge"
