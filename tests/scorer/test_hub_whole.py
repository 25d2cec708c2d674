"""Commits of which another program fetched a part: never taken for whole."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scorer.hub_server import FILES, Hub, Resolve, resolver, run_client, running_hub

# As programs do that want a model and its tokenizer only.
FETCH = """
import sys
from huggingface_hub import hf_hub_download

for name in sys.argv[2:]:
    hf_hub_download("org/name", name, revision=sys.argv[1])
"""
TRAINED = {**FILES, "schema_config.json": b'{"task": "t"}'}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "hf"


@pytest.fixture
def resolve(hub, home) -> Resolve:
    return resolver(hub, home)


@pytest.fixture
def storage(home) -> Path:
    return home / "hub" / "models--org--name"


@pytest.fixture
def partly(hub, home, storage) -> str:
    """Let another program fetch everything but the prompt contract; return the commit."""
    commit = hub.add("org/name", TRAINED)
    run_client(FETCH, hub, home, "main", *FILES)
    assert {path.name for path in (storage / "snapshots" / commit).iterdir()} == set(FILES)
    hub.asked.clear()
    return commit


@pytest.mark.parametrize("pinned", [False, True])
def test_offline_a_part_is_refused(hub, resolve, storage, partly, pinned):
    name = f"org/name@{partly}" if pinned else "org/name"
    (found,) = resolve(name, HF_HUB_OFFLINE="1")
    # Without its contract the model would score in another layout, at another temperature.
    assert f"{name} must be known to be whole in the cache, as HF_HUB_OFFLINE" in found["error"]
    assert str(storage / "snapshots" / partly) in found["error"]
    assert f"weighbridge checkpoint info {name}; or" in found["hint"]
    assert "name the folder itself" in found["hint"]
    assert (found["said"], hub.asked) == ([], [])


@pytest.mark.parametrize("pinned", [False, True])
def test_online_the_rest_is_fetched_once(hub, resolve, partly, pinned):
    name = f"org/name@{partly}" if pinned else "org/name"
    (found,) = resolve(name)
    assert set(found["names"]) == set(TRAINED)
    assert hub.fetched() == ["schema_config.json"]
    assert ": 1 file, " in found["said"][0]
    hub.asked.clear()
    # From now on it is known to be whole, and nobody has to be asked.
    (again,) = resolve(f"org/name@{partly}")
    (offline,) = resolve("org/name", HF_HUB_OFFLINE="1")
    assert again["folder"] == offline["folder"] == found["folder"]
    assert hub.asked == []


def test_what_is_whole_but_not_known_to_be_is_asked_once(hub, home, resolve):
    commit = hub.add("org/name", TRAINED)
    run_client(FETCH, hub, home, commit, *TRAINED)
    (offline,) = resolve(f"org/name@{commit}", HF_HUB_OFFLINE="1")
    assert "must be known to be whole" in offline["error"]
    hub.asked.clear()
    (found,) = resolve(f"org/name@{commit}")
    assert (found["said"], hub.fetched()) == ([], [])
    assert hub.asked
    hub.asked.clear()
    (found,) = resolve(f"org/name@{commit}")
    assert (found["commit"], hub.asked) == (commit, [])


def test_a_cache_that_keeps_no_list_is_asked_each_time(hub, resolve, storage, partly):
    storage.joinpath("trees").write_text("as good as a folder that nobody may write to")
    for _ in range(2):
        (found,) = resolve(f"org/name@{partly}")
        assert set(found["names"]) == set(TRAINED)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format_version": 99, "files": {}}'])
def test_a_list_that_cannot_be_read_is_no_list(hub, resolve, storage, partly, text):
    (storage / "trees").mkdir()
    (storage / "trees" / f"{partly}.json").write_text(text)
    (found,) = resolve("org/name", HF_HUB_OFFLINE="1")
    assert "must be known to be whole" in found["error"]


def test_a_checkpoint_without_a_tokenizer(hub, home, resolve, storage):
    files = {name: content for name, content in FILES.items() if name != "tokenizer.json"}
    commit = hub.add("org/name", files)
    run_client(FETCH, hub, home, "main", *files)
    (offline,) = resolve("org/name", HF_HUB_OFFLINE="1")
    assert 'lacks "tokenizer.json"' in offline["error"]
    (online,) = resolve("org/name")
    assert f"{commit} must be whole on 127.0.0.1" in online["error"]
    assert 'lacks "tokenizer.json"' in online["error"]
    # Any vocabulary is one.
    hub.add("org/name", {**files, "tekken.json": b"{}"})
    (found,) = resolve("org/name")
    assert "tekken.json" in found["names"]


def test_a_link_into_removed_blobs_is_missing(hub, resolve, storage):
    hub.add("org/name", FILES)
    folder = Path(resolve("org/name")[0]["folder"])
    shutil.rmtree(storage / "trees")
    (folder / "chat_template.jinja").resolve().unlink()
    (offline,) = resolve("org/name", HF_HUB_OFFLINE="1")
    assert 'lacks "chat_template.jinja"' in offline["error"]


REMEMBER = """
import json, os, resource, signal, stat, sys
from pathlib import Path
from weighbridge.scorer.hub_cache import remember_commit, remembered_commit, storage

os.umask(0o022)
refs = storage("org/name") / "refs"
told = {}
for commit in ("a" * 40, "b" * 40):
    remember_commit("org/name", None, commit)
    told[commit[0]] = remembered_commit("org/name", None) == commit
told["mode"] = oct(stat.S_IMODE((refs / "main").stat().st_mode))
(refs / "dev").mkdir()
remember_commit("org/name", "dev", "c" * 40)
remember_commit("org/name", "refs/pr/1", "d" * 40)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
remember_commit("org/name", None, "e" * 40)
told["main"] = remembered_commit("org/name", None)
told["files"] = sorted(str(path.relative_to(refs)) for path in refs.rglob("*"))
os.write(1, json.dumps(told).encode())
"""


def test_a_branch_is_remembered_without_leftovers(hub, home):
    told = json.loads(run_client(REMEMBER, hub, home).stdout)
    assert told["a"]
    assert told["b"]
    # As files of the library are: others who share the cache can read it.
    assert told["mode"] == "0o644"
    # Neither a name that is taken nor a full disk leaves a half file, or a half commit.
    assert told["main"] == "b" * 40
    assert told["files"] == ["dev", "main", "refs", "refs/pr", "refs/pr/1"]
