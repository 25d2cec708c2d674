"""Runs with an adapter, with a prompt that was accepted, and what they record of it."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytestmark = [pytest.mark.mlx, pytest.mark.prefect, pytest.mark.slow]

TEXTS = ["The food was awful.", "A lovely evening."]
PROMPT = "Name the choice that fits. Say its letter only."


@pytest.fixture
def adapter(tmp_path: Path, embedded: Path) -> Path:
    """A random LoRA adapter of the embedded model in the files of mlx-lm."""
    width = json.loads((embedded / "config.json").read_text())["hidden_size"]
    folder = tmp_path / "lora"
    folder.mkdir()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    name = "model.layers.29.self_attn.q_proj"
    tensors = {
        f"{name}.lora_a": draw.normal(0, 0.1, (width, 4)).astype(np.float32),
        f"{name}.lora_b": draw.normal(0, 0.1, (4, width)).astype(np.float32),
    }
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def logits(bench: Any, run_id: int) -> list[float]:
    rows = bench.rows(
        "select logit from choice_probabilities where run_id = ? order by position, field, choice",
        run_id,
    )
    return [row["logit"] for row in rows]


def test_an_adapter_makes_other_decisions_and_is_recorded(bench, adapter, embedded):
    plain = bench.score(TEXTS)
    tuned = bench.score(TEXTS, adapter=str(adapter))
    again = bench.score(TEXTS, adapter=str(adapter))
    # The key of a decision holds the adapter: neither is taken for the other, nor scored twice.
    assert [each["scored"] for each in (plain, tuned, again)] == [2, 2, 0]
    assert again["reused"] == 2
    assert logits(bench, plain["run_id"]) != logits(bench, tuned["run_id"])
    assert logits(bench, again["run_id"]) == logits(bench, tuned["run_id"])
    sources = bench.rows("select checkpoint_source, adapter_source from run order by id")
    assert {row["checkpoint_source"] for row in sources} == {str(embedded)}
    assert [row["adapter_source"] for row in sources] == [None, str(adapter), str(adapter)]
    checkpoints = bench.rows("select name, adapter_sha256 from checkpoint order by id")
    assert checkpoints[0]["adapter_sha256"] is None
    sha256 = hashlib.sha256((adapter / "adapters.safetensors").read_bytes()).hexdigest()
    assert checkpoints[1]["adapter_sha256"] == sha256
    assert checkpoints[1]["name"].endswith(" + lora")


def test_the_setting_brings_the_adapter_of_its_own_checkpoint_only(
    bench, adapter, embedded, monkeypatch
):
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(embedded))
    monkeypatch.setenv("WEIGHBRIDGE_ADAPTER", str(adapter))
    bench.score(TEXTS, checkpoint=None)
    bench.score(TEXTS)  # which names the checkpoint, and no adapter
    names = bench.rows("select name from checkpoint order by id")
    assert [row["name"].endswith(" + lora") for row in names] == [True, False]


def test_an_accepted_prompt_is_recorded_and_any_other_refused(bench, embedded, tmp_path):
    from weighbridge.scorer.errors import CheckpointError

    trained = shutil.copytree(embedded, tmp_path / "trained")
    config = {"task": "schema_candidate_classification_v1", "max_length": 512}
    (trained / "schema_config.json").write_text(json.dumps(config))
    (trained / "system_prompt.txt").write_text(PROMPT)
    with pytest.raises(CheckpointError, match="sha256"):
        bench.score(TEXTS, checkpoint=str(trained))
    outcome = bench.score(TEXTS, checkpoint=str(trained), accept_prompt=True)
    plain = bench.score(TEXTS)
    assert [each["scored"] for each in (outcome, plain)] == [2, 2]
    runs = bench.rows("select contract, layout, accepted_prompt_sha256 from run order by id")
    assert runs[0] == {
        "contract": config["task"],
        "layout": "context-first",
        "accepted_prompt_sha256": hashlib.sha256(PROMPT.encode()).hexdigest(),
    }
    assert runs[1]["accepted_prompt_sha256"] is None


def test_a_retry_goes_on_with_the_files_it_began_with(bench, adapter, embedded, monkeypatch):
    from weighbridge.tasks.recording import as_begun
    from weighbridge.tasks.scorers import ScorerSpec
    from weighbridge.tasks.settings import as_database_url

    bench.score(TEXTS, adapter=str(adapter))
    (begun,) = bench.rows("select flow_run_id from run")
    asked = ScorerSpec(checkpoint="org/name", revision="main", temperature=2.0)
    url = as_database_url(str(bench.database))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", begun["flow_run_id"])
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "1")
    assert as_begun(asked, url) == asked
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "2")
    # The branch that was asked for may be elsewhere by now; all else is as asked.
    files = {"checkpoint": str(embedded), "adapter": str(adapter), "revision": None}
    assert as_begun(asked, url) == asked.model_copy(update=files)
    # Without a run, or a store, there is nothing to go on with.
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "0" * 8)
    assert as_begun(asked, url) == asked
    assert as_begun(asked, as_database_url(str(bench.folder / "none.db"))) == asked


def test_a_model_is_compared_with_itself_and_an_adapter(
    bench, adapter, embedded, monkeypatch, capsys
):
    from weighbridge.deployments.cli import main

    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", str(bench.database))
    documents = bench.request(TEXTS).documents
    schema = bench.request(TEXTS).schema_
    command = ["score", documents, "--schema", schema, "--checkpoint", str(embedded)]
    assert main([*command, "--against-adapter", str(adapter), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["first"]["scored"] == told["second"]["scored"] == 2
    sources = bench.rows("select checkpoint_source, adapter_source from run order by id")
    assert [row["adapter_source"] for row in sources] == [None, str(adapter)]
    assert {row["checkpoint_source"] for row in sources} == {str(embedded)}
