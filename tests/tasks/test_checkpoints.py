"""Which files a name means: paths, hub ids, and revisions beside them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.scorer.errors import CheckpointError
from weighbridge.tasks.checkpoints import on_hub, resolve_adapter, resolve_checkpoint
from weighbridge.tasks.settings import Settings

COMMIT = "a" * 40


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(cache=tmp_path / "cache", checkpoint=None, adapter=None)


def refused(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert caught.value.hint
    return caught.value


def test_a_relative_path_means_the_same_from_everywhere(settings, tmp_path, monkeypatch):
    (tmp_path / "models" / "chat").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    checkpoint = resolve_checkpoint("chat", settings)
    adapter = resolve_adapter("../models/chat", "chat", settings)
    assert checkpoint.name == str(tmp_path / "models" / "chat")
    assert adapter is not None
    monkeypatch.chdir("/")
    # What is recorded with a run finds the same files in another working folder.
    for name in (checkpoint.name, adapter.name):
        assert Path(name).is_absolute()
        assert Path(name).samefile(tmp_path / "models" / "chat")
        assert resolve_checkpoint(name, settings).name == name


def test_a_home_is_written_out(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/chat", settings).name == str(tmp_path / "chat")


def test_a_link_keeps_its_name(settings, tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "current").symlink_to("v1")
    # Which model `current` is may change: that is what the person named.
    assert resolve_checkpoint("current", settings).name == str(tmp_path / "current")


@pytest.mark.parametrize("name", ["~nobody-by-this-name/x", "a\0b", "./", "/"])
def test_names_that_are_odd_are_still_paths(settings, name):
    assert Path(resolve_checkpoint(name, settings).name).is_absolute()


@pytest.mark.parametrize(
    "revision",
    [
        "",
        " ",
        "a b",
        "../../../x",
        "a/../b",
        "-x",
        "/main",
        "main@x",
        "main?x",
        "main#x",
        "ä",
        "a\n",
    ],
)
def test_what_cannot_be_a_revision_is_asked_of_no_hub(settings, revision):
    error = refused(lambda: resolve_checkpoint("org/name", settings, revision=revision))
    assert "the revision of org/name must be a branch, a tag or a commit, got" in error.message
    # Control characters are shown as such.
    assert "\n" not in error.message
    assert "leave it out" in (error.hint or "")


@pytest.mark.parametrize("revision", ["main", "refs/pr/1", "v1.0", COMMIT])
def test_a_revision_is_looked_up(settings, revision):
    # Offline, as all tests are: the same as if it stood in the name.
    beside = refused(lambda: resolve_checkpoint("org/name", settings, revision=revision))
    within = refused(lambda: resolve_checkpoint(f"org/name@{revision}", settings))
    assert f"org/name@{revision} must be a folder here or in the cache" in beside.message
    assert beside.message == within.message


def test_two_revisions_are_refused(settings):
    error = refused(lambda: resolve_checkpoint("org/name@main", settings, revision="dev"))
    assert "got 'main' in its name and 'dev' beside it" in error.message


def test_of_another_model_a_revision_is_only_a_label(settings):
    # What a copy on the hub was made from says nothing of what to fetch.
    error = refused(
        lambda: resolve_checkpoint("org/copy", settings, model_id="org/origin", revision="a b")
    )
    assert error.message.startswith("org/copy must be a folder here or in the cache")
    named = resolve_checkpoint(".", settings, model_id="org/origin", revision="any words")
    assert (named.model_id, named.revision) == ("org/origin", "any words")


def test_a_path_wins_over_a_hub_id(settings, tmp_path):
    assert on_hub("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not on_hub("org/name")
    assert resolve_checkpoint("org/name", settings).name == str(tmp_path / "org" / "name")
