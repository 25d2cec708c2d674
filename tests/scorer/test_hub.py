"""Hub ids: the real client against a small hub on this machine, in processes of their own."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scorer.hub_server import FILES, Hub, Resolve, resolver, running_hub

from weighbridge.scorer.hub import HubId, parse_hub_id
from weighbridge.scorer.hub_errors import unanswered

NEVER = {
    "modeling_own.py": b"code",
    "pytorch_model.bin": b"pickle",
    "model-q4.gguf": b"GGUF",
    "onnx/model.onnx": b"onnx",
    "original/model.safetensors": b"other weights",
    "model.fp16.safetensors": b"the same weights again",
    "consolidated.safetensors": b"and again",
    "README.md": b"# A model",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "hf" / "hub"


@pytest.fixture
def resolve(hub, tmp_path) -> Resolve:
    return resolver(hub, tmp_path / "hf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("Org-1/Name_2.5-4bit", HubId("Org-1/Name_2.5-4bit")),
        ("org/name@main", HubId("org/name", "main")),
        ("org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("org/name@" + "ab" * 20, HubId("org/name", "ab" * 20)),
    ],
)
def test_what_a_hub_id_is(text, expected):
    assert parse_hub_id(text) == expected
    assert str(expected) == text


def test_a_commit_in_capitals_is_the_same():
    assert parse_hub_id("org/name@" + "AB" * 20) == HubId("org/name", "ab" * 20)
    # Names of branches keep their case.
    assert parse_hub_id("org/name@" + "AB" * 19) == HubId("org/name", "AB" * 19)


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "/", "a/", "/a", "./name", "../name", "/org/name", "~/name", "a/b/c"),
        *("org//name", "org/na me", "org/na\nme", "C:/model", "C:\\model", "org\\name"),
        *("örg/name", "org/name@", "org/name@ x", "org/name@../x", "org/name@-x", "@org/name"),
        *("org/-name", "org/name.", "org/a--b", "org/a..b", "org/name.git", "o/" + "n" * 95),
        *("https://huggingface.co/org/name", "org/name?x", "org/name#x", "org/name@a@b"),
    ],
)
def test_what_cannot_be_a_hub_id(text):
    # So it is read as a path, and never asked of a network.
    assert parse_hub_id(text) is None


def test_an_id_is_pinned_to_a_commit_and_only_what_scores_is_fetched(hub, resolve, cache):
    commit = hub.add("org/name", {**FILES, **NEVER})
    first, again, pinned = resolve("org/name", "org/name@main", f"org/name@{commit}")
    assert first["commit"] == again["commit"] == pinned["commit"] == commit
    assert first["folder"] == str(cache / "models--org--name" / "snapshots" / commit)
    # No code, no pickles, no second copies: named one by one above.
    assert set(first["names"]) == set(FILES)
    assert hub.fetched() == sorted(FILES)
    # Repository, whole commit, size and both ends are told before the first byte.
    (sentence,) = first["said"]
    assert f"fetching org/name at commit {commit}: 4 files, 0.0 MiB" in sentence
    assert f"from 127.0.0.1 into {cache}" in sentence
    assert again["said"] == pinned["said"] == []
    assert (Path(first["folder"]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_whole_commit_in_the_cache_needs_no_network(hub, resolve):
    commit = hub.add("org/name", FILES)
    resolve("org/name")
    hub.asked.clear()
    (found,) = resolve(f"org/name@{commit}")
    # Nothing was asked, although the hub is there.
    assert (found["commit"], found["said"], hub.asked) == (commit, [], [])


def test_other_branches_and_revisions(hub, resolve):
    first = hub.add("org/name", FILES)
    second = hub.add("org/name", {**FILES, "READY.json": b"{}"}, branch="refs/pr/1")
    main, request, short, gone = resolve(
        "org/name", "org/name@refs/pr/1", f"org/name@{first}", "org/name@v9"
    )
    assert [main["commit"], request["commit"], short["commit"]] == [first, second, first]
    assert "READY.json" in request["names"]
    assert "must have the revision that is named, it has no v9" in gone["error"]
    assert f"{hub.url}/org/name" in gone["hint"]


def test_an_update_of_a_branch_fetches_the_new_commit(hub, resolve):
    hub.add("org/name", FILES)
    resolve("org/name")
    newer = hub.add("org/name", {**FILES, "model.safetensors": b"v" * 3000})
    hub.asked.clear()
    (found,) = resolve("org/name")
    assert found["commit"] == newer
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == b"v" * 3000


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, "127.0.0.1 cannot be reached"),
    ],
)
def test_without_a_connection_the_cache_is_taken_and_told(hub, resolve, cache, environment, reason):
    commit = hub.add("org/name", FILES)
    resolve("org/name")
    hub.asked.clear()
    branch, pinned, other, unknown = resolve(
        "org/name", f"org/name@{commit}", "org/name@dev", "org/gone", **environment
    )
    assert branch["commit"] == pinned["commit"] == commit
    # A branch may have moved since, so it is said; a commit cannot.
    (sentence,) = branch["said"]
    assert sentence.startswith(f"{reason}: taking org/name at commit {commit} from {cache}")
    assert pinned["said"] == []
    # Never another revision than the one that was named; the one that is there is offered.
    assert "org/name@dev must be a folder here or in the cache" in other["error"]
    told = "got neither: there is no folder of that name here, and the cache is"
    assert other["error"].endswith(f"as {reason}; {told} {cache}")
    assert f"name a commit that is there: org/name@{commit}" in other["hint"]
    assert "org/gone must be a folder here or in the cache" in unknown["error"]
    assert "weighbridge checkpoint info org/gone" in unknown["hint"]
    # Named only where it is set.
    assert ("HF_HUB_OFFLINE" in unknown["hint"]) == ("HF_HUB_OFFLINE" in environment)
    assert "models--org--gone" in unknown["hint"]
    assert hub.asked == []


def test_a_hub_that_is_down_is_told_by_its_status(hub, resolve):
    commit = hub.add("org/name", FILES)
    resolve("org/name")
    hub.repos["org/name"].error = (503, "")
    (found,) = resolve("org/name")
    assert found["commit"] == commit
    assert found["said"][0].startswith("127.0.0.1 answers HTTP 503: taking org/name at commit")


def test_half_a_snapshot_is_noticed(hub, resolve, cache):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": b"1" * 100,
        "model-2.safetensors": b"2" * 100,
    }
    commit = hub.add("org/name", files)
    folder = Path(resolve("org/name")[0]["folder"])
    # As after another program fetched single files only: no list of all files is kept.
    shutil.rmtree(cache / "models--org--name" / "trees")
    (folder / "model-2.safetensors").resolve().unlink()
    (folder / "model-2.safetensors").unlink()
    (offline,) = resolve("org/name", HF_HUB_OFFLINE="1")
    assert f'{folder} lacks "model-2.safetensors"' in offline["error"]
    hub.asked.clear()
    # With the hub there, only what is missing is fetched; the pinned commit does not hide it.
    (online,) = resolve(f"org/name@{commit}")
    assert hub.fetched() == ["model-2.safetensors"]
    assert ": 1 file, " in online["said"][0]
    # A file of configuration alone is no model either.
    for name in ("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    shutil.rmtree(cache / "models--org--name" / "trees")
    (bare,) = resolve("org/name", HF_HUB_OFFLINE="1")
    assert 'lacks "model.safetensors"' in bare["error"]


REFUSALS = [
    ((404, "RepoNotFound"), "must be a folder here or a repository on 127.0.0.1", "spelling"),
    # So the hub answers for one that is private or not there, when nobody has logged in.
    ((401, "RepoNotFound"), "must be a folder here or a repository on 127.0.0.1", "HF_TOKEN"),
    ((401, ""), "must give access to", "HF_TOKEN"),
    ((401, "GatedRepo"), "must be granted to your account first: it is gated", "accept its"),
    ((403, "GatedRepo"), "must be granted to your account first: it is gated", "hf auth login"),
    ((403, ""), "it refused (HTTP 403)", "HF_TOKEN"),
    ((429, ""), "too many requests (HTTP 429)", "some minutes"),
    ((410, ""), "it answered otherwise (HTTP 410)", "HF_ENDPOINT"),
    ((404, ""), "must be a folder here or a repository on 127.0.0.1", "spelling"),
    ((500, ""), "in the cache, as 127.0.0.1 answers HTTP 500", "try again later: weighbridge"),
    ((503, ""), "in the cache, as 127.0.0.1 answers HTTP 503", "try again later: weighbridge"),
]


def test_each_refusal_of_the_hub(hub, resolve):
    names = [f"org/name{number}" for number in range(len(REFUSALS))]
    for name, (answer, _, _) in zip(names, REFUSALS, strict=True):
        hub.add(name, FILES)
        hub.repos[name].error = answer
    for found, name, (_, message, hint) in zip(resolve(*names), names, REFUSALS, strict=True):
        assert message in found["error"]
        assert name in found["error"] or "too many" in message
        assert hint in found["hint"]
        assert found["said"] == []


def test_a_gated_repository_is_found_out_at_its_files(hub, resolve):
    hub.add("org/name", FILES)
    hub.repos["org/name"].gated = True
    (found,) = resolve("org/name")
    # The hub describes such a repository to everyone.
    assert found["said"]
    assert "is gated" in found["error"]
    assert hub.tokens == {"Bearer hf_nobody_may_see_this"}


FOREIGN = [
    ({"config.json": b"", "model-Q4_K_M.gguf": b""}, 'GGUF ("model-Q4_K_M.gguf")'),
    ({"config.json": b"", "pytorch_model.bin": b""}, "a pickle of PyTorch"),
    ({"params.json": b"", "consolidated.safetensors": b""}, "the layout of Mistral's own"),
    ({"model_index.json": b"", "unet/a.safetensors": b""}, "a pipeline that makes images"),
    ({"onnx/model.onnx": b"", "config.json": b""}, 'ONNX ("onnx/model.onnx")'),
    ({"README.md": b""}, "no weights"),
]


def test_a_repository_without_safetensors(hub, resolve):
    names = [f"org/name{number}" for number in range(len(FOREIGN))]
    for name, (files, _) in zip(names, FOREIGN, strict=True):
        hub.add(name, files)
    for found, name, (_, holds) in zip(resolve(*names), names, FOREIGN, strict=True):
        assert f"{name} on 127.0.0.1 holds {holds}" in found["error"]
        assert found["said"] == []
        assert found["hint"]
    # Told from the names alone.
    assert hub.fetched() == []


def test_an_adapter_is_fetched_too(hub, resolve):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a" * 9}
    hub.add("org/lora", files)
    online, offline = resolve("org/lora")[0], resolve("org/lora", HF_HUB_OFFLINE="1")[0]
    assert online["names"] == offline["names"] == sorted(files)


def test_a_disk_that_is_too_small_is_told_before(hub, resolve):
    hub.add("org/name", FILES)
    hub.repos["org/name"].claims["model.safetensors"] = 2**60
    (found,) = resolve("org/name")
    assert re.search(r"needs 1073741824\.00 GiB where \d+\.\d+ GiB are free in", found["error"])
    assert "HF_HUB_CACHE" in found["hint"]
    assert hub.fetched() == []


@pytest.mark.slow
def test_a_download_that_breaks_off_goes_on_later(hub, resolve):
    first = hub.add("org/name", FILES)
    resolve("org/name")
    newer = hub.add("org/name", {**FILES, "model.safetensors": b"v" * 5000, "READY.json": b"{}"})
    hub.repos["org/name"].cut["model.safetensors"] = 100
    # The client tries a few times by itself.
    (broken,) = resolve("org/name")
    assert "must come to its end, it broke off" in broken["error"]
    assert "run the same command again" in broken["hint"]
    # Without a connection the commit before it is still there, whole.
    (offline,) = resolve("org/name", HF_HUB_OFFLINE="1")
    assert offline["commit"] == first
    hub.repos["org/name"].cut.clear()
    hub.asked.clear()
    (found,) = resolve("org/name")
    assert found["commit"] == newer
    assert hub.fetched() == ["model.safetensors"]


def test_a_cache_that_cannot_be_written(hub, resolve, tmp_path):
    hub.add("org/name", FILES)
    (tmp_path / "file").write_text("no folder")
    (found,) = resolve("org/name", HF_HUB_CACHE=str(tmp_path / "file"))
    assert "the cache of the hub must be a folder that you may write to" in found["error"]
    assert "HF_HUB_CACHE" in found["hint"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="where no disk is, none is full")
def test_a_cache_where_no_disk_is(hub, resolve):
    hub.add("org/name", FILES)
    (found,) = resolve("org/name", HF_HUB_CACHE="/proc/hub")
    assert "must be a folder that you may write to, got /proc/hub" in found["error"]
    assert hub.fetched() == []


def test_a_hub_that_is_slow_is_no_missing_connection():
    import httpx

    slow, gone = unanswered(httpx.ReadTimeout("")), unanswered(httpx.ConnectError(""))
    assert (slow.later, gone.later) == (True, False)
    assert "did not answer in time" in slow.reason
    assert "cannot be reached" in gone.reason


def test_an_address_with_a_password_is_not_shown(hub, resolve):
    hub.add("org/gated", FILES)
    hub.repos["org/gated"].gated = True
    secret = hub.url.replace("http://", "http://me:hunter2@")
    gone, gated = resolve("org/gone", "org/gated", HF_ENDPOINT=secret)
    (down,) = resolve("org/gone", HF_ENDPOINT="http://me:hunter2@127.0.0.1:1")
    assert "repository on 127.0.0.1" in gone["error"]
    assert "is gated" in gated["error"]
    assert "cannot be reached" in down["error"]
    # Nor in a traceback, which a log of a run holds.
    for found in (gone, gated, down):
        assert "Traceback" in found["traceback"]
        assert "hunter2" not in json.dumps(found)


def test_the_library_is_not_imported_for_a_name(fresh_process):
    code = """
    import sys
    from weighbridge.scorer.hub import parse_hub_id
    parse_hub_id("org/name")
    print({"huggingface_hub", "mlx", "transformers"} & set(sys.modules))
    """
    # Whether a name is a path must be quick to tell.
    assert fresh_process(code).stdout.strip() == "set()"


def test_telemetry_is_off_unless_asked_for(fresh_process):
    code = """
    import os
    os.environ.pop("HF_HUB_DISABLE_TELEMETRY", None)
    os.environ.pop("DO_NOT_TRACK", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    {setting}
    from weighbridge.scorer.hub import HubId, resolve_hub_id
    try:
        resolve_hub_id(HubId("org/name"), say=print)
    except Exception as error:
        from huggingface_hub import constants
        print(type(error).__name__, constants.HF_HUB_DISABLE_TELEMETRY)
    """
    off = fresh_process(code.replace("{setting}", "")).stdout
    on = code.replace("{setting}", 'os.environ["HF_HUB_DISABLE_TELEMETRY"] = "0"')
    assert off.split() == ["CheckpointError", "True"]
    assert fresh_process(on).stdout.split() == ["CheckpointError", "False"]
