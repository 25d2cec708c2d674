"""Which files a name means: paths, hub ids, and revisions beside them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.scorer.checkpoint_folder import check_folder
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
    (tmp_path / "chat").mkdir()
    assert resolve_checkpoint("~/chat", settings).name == str(tmp_path / "chat")


def test_a_link_keeps_its_name(settings, tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "current").symlink_to("v1")
    # Which model `current` is may change: that is what the person named.
    assert resolve_checkpoint("current", settings).name == str(tmp_path / "current")


@pytest.mark.parametrize("name", ["./", "/"])
def test_names_that_are_odd_are_still_paths(settings, name):
    assert Path(resolve_checkpoint(name, settings).name).is_absolute()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("models/chatt", "did you mean models/chat?"),
        ("./models/chatt", "did you mean models/chat?"),
        ("HERE/models/chatt", "did you mean HERE/models/chat?"),
        ("./modles/chat", "did you mean models/chat?"),
        ("HERE/modles/Chat", "did you mean HERE/models/chat?"),
        ("chatt", "did you mean models/chat?"),
        ("chat", "did you mean models/chat?"),
        ("modles", "did you mean models?"),
        ("models/other", "check the path: the folder models is here, .*models/other@main"),
        ("llama3:8b", "name a model of a hub as org/name; .*Ollama"),
        ("llama", "check the path, or name a model of a hub as org/name"),
        ("org/name.git", "name a model of a hub as org/name: org/name$"),
        ("org/name@", "name a model of a hub as org/name: org/name$"),
        ("HERE/nothing/at/all", "check the path"),
        ("~nobody-by-this-name/x", "check the path"),
        ("a\0b", "check the path"),
        ("n" * 300, "check the path"),
    ],
)
def test_what_is_not_there_and_what_may_be_meant(settings, tmp_path, name, hint):
    (tmp_path / "models" / "chat").mkdir(parents=True)
    (tmp_path / "models" / "chat" / "config.json").write_text("{}")
    name, hint = (text.replace("HERE", str(tmp_path)) for text in (name, hint))
    assert not on_hub(name)
    checkpoint = refused(lambda: resolve_checkpoint(name, settings))
    assert checkpoint.message.startswith("a checkpoint must be an existing folder, got")
    assert re.search(hint.replace("?", r"\?"), checkpoint.hint or "")
    adapter = refused(lambda: resolve_adapter(name, ".", settings))
    assert adapter.message.startswith("an adapter must be an existing folder, got")
    assert adapter.hint == checkpoint.hint


def test_a_path_that_looks_like_a_hub_id(settings, tmp_path):
    (tmp_path / "models" / "chat").mkdir(parents=True)
    assert on_hub("modles/chat")
    error = refused(lambda: resolve_checkpoint("modles/chat", settings))
    assert error.message.startswith("modles/chat must be a folder here or in the cache")
    assert (error.hint or "").startswith("did you mean models/chat? if not: ")
    # Negative control: what is close to nothing is only told how to be fetched.
    assert "did you mean" not in (
        refused(lambda: resolve_checkpoint("org/name", settings)).hint or ""
    )


def test_a_revision_makes_it_a_hub_id(settings, tmp_path):
    (tmp_path / "org").mkdir()
    # A path that was mistyped is asked of no hub.
    assert not on_hub("org/name")
    # As runs record it, it means the same in every working folder.
    assert on_hub(f"org/name@{COMMIT}")
    assert on_hub("other/name")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("https://me:hunter2@huggingface.co/org/name", "name a model of a hub as org/name"),
        ("https://huggingface.co/org/name?token=hunter2", "name it as org/name"),
        ("https://huggingface.co/org/name/tree/main#hunter2", "name it as org/name"),
        ("https://example.org/hunter2/name", "name a model of a hub as org/name"),
        ("HTTPS://me:hunter2@example.org", "name a model of a hub as org/name"),
        ("https://me:hunter2/3@huggingface.co/org/name", "name a model of a hub as org/name"),
        ("https://hunter2@huggingface.co/org/name", "name a model of a hub as org/name"),
        ("hf://org/name", "name it as org/name"),
        ("hf://me:hunter2@org/name", "name a model of a hub as org/name"),
        ("s3://key:hunter2@bucket/name", "name a model of a hub as org/name"),
        ("git+ssh://me:hunter2@host/org/name.git", "name a model of a hub as org/name"),
        ("me:hunter2@huggingface.co/org/name", "name a model of a hub as org/name"),
        ("file:///models/hunter2", "by its path, without file://"),
        ("org/name?token=hunter2", "as org/name alone"),
    ],
)
def test_of_an_address_no_secret_is_shown(settings, name, hint):
    assert not on_hub(name)
    calls = [
        lambda: resolve_checkpoint(name, settings),
        lambda: resolve_adapter(name, ".", settings),
        # Who skips the names looks at the folder itself.
        lambda: check_folder(Path(name)),
        lambda: check_folder(Path(name).absolute()),
    ]
    for call in calls:
        error = refused(call)
        assert "must be an existing folder, got" in error.message
        assert "hunter2" not in f"{error.message} {error.hint}"
    assert hint in (refused(calls[0]).hint or "")


def test_offline_an_adapter_is_fetched_with_its_base(settings):
    error = refused(lambda: resolve_adapter("org/lora", "org/base", settings))
    # Alone an adapter is refused, though it is fetched.
    assert "weighbridge checkpoint info org/base --adapter org/lora;" in (error.hint or "")
    assert "there is no folder of that name here" in error.message
    checkpoint = refused(lambda: resolve_checkpoint("org/base", settings))
    assert "weighbridge checkpoint info org/base;" in (checkpoint.hint or "")


def test_a_commit_may_be_written_in_capitals(settings):
    within = refused(lambda: resolve_checkpoint(f"org/name@{COMMIT.upper()}", settings))
    beside = refused(lambda: resolve_checkpoint("org/name", settings, revision=COMMIT.upper()))
    both = refused(
        lambda: resolve_checkpoint(f"org/name@{COMMIT}", settings, revision=COMMIT.upper())
    )
    assert within.message == beside.message == both.message
    assert f"org/name@{COMMIT} must be a folder" in within.message


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
