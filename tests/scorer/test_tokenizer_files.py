"""Tokenizers and chat templates that are missing or damaged, told before anything is loaded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.tokenizer_files import check_tokenizer

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
WHOLE = '{"model": {"vocab": {}}}'


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tokenizer.json").write_text(WHOLE)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return tmp_path


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        check_tokenizer(folder)
    assert caught.value.hint
    return caught.value


def test_a_whole_tokenizer_passes(folder):
    # Without it, a check that refuses everything would pass below.
    check_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "accepted"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("chat_template.json", '{"chat_template": "{{ messages }}"}', True),
        ("additional_chat_templates/own.jinja", "{{ messages }}", True),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a", "template": "b"}]}', True),
        ("chat_template.jinja", "", False),
        ("chat_template.json", "{}", False),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("README.md", "chat_template", False),
    ],
)
def test_where_a_chat_template_may_be(folder, name, content, accepted):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    if accepted:
        check_tokenizer(folder)
        return
    error = refused(folder)
    # As a base model is published.
    assert "must have a chat template, got a tokenizer without one" in error.message
    assert "use an instruct model" in (error.hint or "")


def test_without_a_configuration_there_is_no_template(folder):
    (folder / "tokenizer_config.json").unlink()
    assert "must have a chat template" in refused(folder).message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", LFS, "tokenizer.json must be the file itself.*Git LFS"),
        ("tokenizer_config.json", LFS, "tokenizer_config.json must be the file itself.*Git LFS"),
        ("chat_template.jinja", LFS, "chat_template.jinja must be the file itself.*Git LFS"),
        ("tokenizer.json", "", "tokenizer.json must be a JSON object, got an empty file"),
        ("tokenizer.json", "{}", 'must hold a vocabulary under "model", got an object without'),
        ("tokenizer.json", '{"model": 1}', 'must hold a vocabulary under "model"'),
        ("tokenizer.json", WHOLE[:-1], "must be a JSON object, got 23 bytes of something else"),
        ("tokenizer.json", "[1]", "tokenizer.json must be a JSON object, got a list"),
        ("tokenizer.json", "<html>", "tokenizer.json must be a JSON object, got 6 bytes"),
        ("tokenizer.json", "[" * 100_000, "tokenizer.json must be a JSON object"),
        # Too large to be read as a whole: its ends tell.
        ("tokenizer.json", "{" + " " * 2**20, "must be a JSON object, got 1048577 bytes"),
        ("tokenizer_config.json", "", "tokenizer_config.json must be a JSON object, got an empty"),
        ("tokenizer_config.json", "{", "tokenizer_config.json must be a JSON object, got 1 bytes"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must be a JSON object, got a list"),
    ],
)
def test_damaged_files(folder, name, content, message):
    (folder / name).write_text(content)
    error = refused(folder)
    assert re.search(message, error.message)
    assert str(folder) in (error.hint or "")


def test_a_large_vocabulary_passes(folder):
    vocabulary = {f"token {number}": number for number in range(60_000)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert (folder / "tokenizer.json").stat().st_size > 2**20
    check_tokenizer(folder)


def test_a_template_of_a_model_that_sees_is_used(tiny, tmp_path):
    tiny.tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="must have a chat template"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": tiny.template}))
    check_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "hello"}]
    assert "hello" in ChatTokenizer.load(tmp_path).render(chat)


def test_nothing_heavy_is_imported(folder):
    code = f"""
import sys
from pathlib import Path
from weighbridge.scorer.tokenizer_files import check_tokenizer
check_tokenizer(Path({str(folder)!r}))
print({{"transformers", "tokenizers", "mlx"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
