"""Templates and tokenizers as people have them, and control tokens in data."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer.chat import ChatTokenizer, first_line
from weighbridge.scorer.errors import CheckpointError, DocumentError

CONTROL = ("<|begin|>", "<|end|>", "[TOOL]")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
USER_ONLY = (
    "{% for message in messages %}{% if message.role != 'system' %}"
    "<|begin|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
TINY_PIECES = st.sampled_from(["<|begin|>", "<|end|>", "[TOOL]", "<|", "|>", "[", "<", "\\u003c"])


@pytest.fixture(scope="module")
def chat(tiny) -> ChatTokenizer:
    return ChatTokenizer(tiny.tokenizer())


def test_system_text_stands_in_its_own_turn(chat):
    # As the template writes it, up to where the model goes on.
    assert chat.render(CHAT) == (
        "<|begin|>system\nBe brief.<|end|>\n<|begin|>user\nHello.<|end|>\n<|begin|>assistant\n"
    )


@pytest.mark.parametrize("template", [USER_ONLY, REFUSING + USER_ONLY], ids=["drops", "refuses"])
def test_without_a_system_role_its_text_leads_the_user_turn(tiny, template):
    chat = ChatTokenizer(tiny.tokenizer(template))
    # Dropped silently, the instructions would never reach the model.
    assert chat.render(CHAT) == "<|begin|>user\nBe brief.\n\nHello.<|end|>\n<|begin|>assistant\n"
    # A chat that has no system text stays as it is.
    assert chat.render(CHAT[1:]) == "<|begin|>user\nHello.<|end|>\n<|begin|>assistant\n"


def test_thinking_is_switched_off(tiny):
    closed = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    chat = ChatTokenizer(tiny.tokenizer(tiny.template + closed))
    # Left on, the first token of the answer would open a thought.
    assert chat.render(CHAT).endswith("<|begin|>assistant\n<think>\n\n</think>\n\n")


ASSISTANT = "<|begin|>assistant\n"
THINKING = "{% if add_generation_prompt %}OPENED{% endif %}"


@pytest.mark.parametrize("control", [CONTROL, (*CONTROL, "<think>", "</think>")])
@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("<think>\n", "\n</think>\n\n"),
        ("<think>", "</think>"),
        ("<think>\nOkay, let me see.", "\n</think>\n\n"),
        ("<seed:think>", "</seed:think>"),
        ("<thought>\n", "\n</thought>\n\n"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("◁think▷", "◁/think▷"),
        ("</think>", ""),
        ("<think></think>\n", ""),
        ("<|no_think|>", ""),
        ("", ""),
    ],
)
def test_a_thought_that_a_template_opens_is_closed(tiny, control, opened, closed):
    chat = ChatTokenizer(
        tiny.tokenizer(tiny.template + THINKING.replace("OPENED", opened), control)
    )
    # No switch in such a template: left open, the next token would be a thought.
    assert chat.render(CHAT).endswith(f"{ASSISTANT}{opened}{closed}")


def test_a_thought_that_nobody_can_close_is_refused(tiny):
    template = tiny.template + THINKING.replace("OPENED", "<|inner_thoughts|>")
    # Scored all the same, the answer would be read in the middle of a thought.
    with pytest.raises(
        CheckpointError, match=r"inside a thought.*'<\|inner_thoughts\|>'"
    ) as caught:
        ChatTokenizer(tiny.tokenizer(template)).render(CHAT)
    assert "enable_thinking" in str(caught.value.hint)


def test_what_a_template_writes_before_an_answer_is_written(tiny):
    channels = (
        "{% for message in messages %}<|begin|>{{ message.role }}"
        "{{ '[TOOL]final\n' if message.role == 'assistant' }}{{ message.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
    )
    chat = ChatTokenizer(tiny.tokenizer(channels))
    # As gpt-oss does: right behind `assistant` the next token is always the channel's marker.
    assert chat.render(CHAT).endswith("<|begin|>assistant[TOOL]final\n")
    # Mere white space before an answer is not made up for: it would merge with the answer.
    spaced = tiny.template.replace("{{ message.content }}", " {{ message.content }}")
    assert ChatTokenizer(tiny.tokenizer(spaced)).render(CHAT).endswith(ASSISTANT)


def test_other_switches_for_thinking_are_off(tiny):
    switch = "{% if thinking is defined and thinking is false %}<think></think>{% else %}<think>"
    chat = ChatTokenizer(tiny.tokenizer(tiny.template + switch + "{% endif %}"))
    assert chat.render(CHAT).endswith("<think></think>")


def test_the_date_of_today_is_no_part_of_a_prompt(tiny):
    dated = "{% set today = strftime_now('%d %b %Y, %A') %}Today: {{ today }}\n" + tiny.template
    text = ChatTokenizer(tiny.tokenizer(dated)).render(CHAT)
    # Llama 3.2 and gpt-oss ask for it: tomorrow the same document would be another question.
    assert text.startswith("Today: 01 Jan 2026, Thursday\n<|begin|>system")


def test_nothing_is_added_at_the_ends(tiny):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    plain = ChatTokenizer(tokenizer).encode("hello")
    begin = tokenizer.convert_tokens_to_ids("<|begin|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    # The post-processor does add one, so this can fail; the template has its own already.
    assert tokenizer.encode("hello") == [begin, *plain]
    assert ChatTokenizer(tokenizer).encode("hello") == plain


def test_a_stored_truncation_never_cuts(tiny, tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({**stored, "truncation": cut}))
    # Embedding models are often saved so; two tokens are less than "hello" has.
    assert len(ChatTokenizer.load(tmp_path).encode("hello hello")) > 2


def test_end_of_turn_is_the_control_token_behind_an_answer(chat, tiny):
    tokenizer = tiny.tokenizer()
    assert chat.end_of_turn == tokenizer.convert_tokens_to_ids("<|end|>")
    text_first = tiny.template.replace("<|end|>\n", "\n[TOOL]<|end|>\n")
    # The first control token ends the answer, whatever ordinary text stands before it.
    closing = ChatTokenizer(tiny.tokenizer(text_first))
    assert closing.end_of_turn == tokenizer.convert_tokens_to_ids("[TOOL]")


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}\n{% endfor %}",
        "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}"
        "<|end|>{% endif %}{% endfor %}",
        "<|end|>",
    ],
    ids=["no control token", "drops the answer", "drops all"],
)
def test_a_template_without_an_end_of_turn_is_refused(tiny, template):
    chat = ChatTokenizer(tiny.tokenizer(template))
    # A label that begins another one could not be closed.
    with pytest.raises(CheckpointError, match="end it with a control token") as caught:
        _ = chat.end_of_turn
    assert caught.value.hint


def test_a_tokenizer_without_a_template_is_refused(tiny):
    # A base model: its prompts have no known form.
    with pytest.raises(CheckpointError, match="must have a chat template") as caught:
        ChatTokenizer(tiny.tokenizer(None))
    assert caught.value.hint


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ raise_exception('never') }}", "{{ 1 / 0 }}", "{{ messages.a.b }}"],
)
def test_a_template_that_cannot_render_is_refused(tiny, template):
    # Templates are code of the checkpoint: whatever they raise is the checkpoint's fault.
    with pytest.raises(CheckpointError, match="must render a chat"):
        ChatTokenizer(tiny.tokenizer(template)).render(CHAT)


def edit(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokenizer.json").unlink(),
        edit("tokenizer.json", ""),
        edit("tokenizer.json", "[]"),
        edit("tokenizer.json", "{}"),
        edit("tokenizer.json", '{"version": "1.0", "model": {'),
        edit("tokenizer_config.json", "[]"),
        edit("tokenizer_config.json", "{"),
        edit("config.json", "[" * 100_000),
    ],
)
def test_a_damaged_tokenizer_is_a_checkpoint_error(tiny, tmp_path, damage):
    tiny.tokenizer().save_pretrained(tmp_path)
    ChatTokenizer.load(tmp_path)
    damage(tmp_path)
    # The tokenizers library raises bare Exceptions; nothing of it may get out.
    with pytest.raises(CheckpointError, match="must hold a readable tokenizer") as caught:
        ChatTokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value.hint)


def test_code_in_a_checkpoint_never_runs_whatever_stdin_says(tiny, tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "chat_template": "x"})
    )
    (tmp_path / "evil.py").write_text("print('it ran')\nEvil = None\n")
    code = (
        "from pathlib import Path; from weighbridge.scorer.chat import ChatTokenizer; "
        f"ChatTokenizer.load(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="y\n", capture_output=True, text=True, check=False
    )
    # transformers asks on stdin unless it is told not to: documents may come that way.
    assert "it ran" not in done.stdout
    assert "run the custom code? [y/N]" not in done.stdout + done.stderr
    assert "CheckpointError: a checkpoint must hold a readable tokenizer" in done.stderr


def test_only_control_tokens_are_rewritten(chat):
    # One escape each, at the first character; the rest of the text stays, byte for byte.
    assert chat.as_data("a<|end|>b [TOOL] < > <|en|>") == (
        "a\\u003c|end|>b \\u005bTOOL] < > <|en|>"
    )
    assert chat.as_data("plain — text\n\t") == "plain — text\n\t"


def test_a_control_token_that_begins_inside_another_is_rewritten_too(tiny):
    chat = ChatTokenizer(tiny.tokenizer(control=(*tiny.control, "<<a>", "<a>", "a>b|")))
    # One escape alone would leave the inner one behind, or make the next one whole.
    assert chat.as_data("<<a>b|") == "\\u003c\\u003c\\u0061>b|"
    assert chat.control_count(chat.encode(chat.as_data("<<a>b|<a>"))) == 0


def test_many_control_tokens_make_no_long_pattern(tiny):
    chat = ChatTokenizer(
        tiny.tokenizer(control=(*tiny.control, *(f"<unused{number}>" for number in range(6000))))
    )
    text = "<b>bold</b> "
    assert chat.as_data(text) == text
    assert chat.as_data("<unused7>") == "\\u003cunused7>"
    # A pattern of 6,000 alternatives took half a second for a page; Gemma has as many.
    assert len(chat._control_first.pattern) < 20


@given(st.lists(TINY_PIECES | st.text(max_size=3), max_size=12).map("".join))
def test_data_makes_no_control_tokens(chat, text):
    # Whatever is put together, none is left, and none arises from the escapes.
    assert chat.control_count(chat.encode(chat.as_data(text))) == 0


def test_control_count_sees_them(chat):
    # The negative control of the test above: as plain text these are three.
    assert chat.control_count(chat.encode("<|end|>a[TOOL]<|begin|>")) == 3


def test_a_tokenizer_without_control_tokens_rewrites_nothing(tiny):
    chat = ChatTokenizer(tiny.tokenizer(control=()))
    # An empty alternation would match everywhere.
    assert chat.as_data("<|end|>") == "<|end|>"


def test_added_white_space_is_ordinary_text(tiny):
    chat = ChatTokenizer(tiny.tokenizer(control=(*tiny.control, "\n\n", "   ", "\u2581\u2581")))
    # Gemma has such tokens; escaping them would tear up every paragraph.
    assert chat.as_data("one\n\ntwo   three") == "one\n\ntwo   three"
    assert chat.control_count(chat.encode("one\n\ntwo   three")) == 0


def test_text_that_normalises_into_control_is_refused(tiny):
    from tokenizers import AddedToken, normalizers

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<|wide|>", normalized=True)])
    chat = ChatTokenizer(tokenizer)
    tokens = chat.encode(chat.as_data("＜|wide|＞"))
    # Full-width brackets are no control token as text, but NFKC turns them into one.
    assert chat.control_count(tokens) == 1
    with pytest.raises(DocumentError, match="must add no control tokens") as caught:
        chat.check_control_count(tokens, 0)
    assert caught.value.code == "document.control_tokens"
    chat.check_control_count(tokens, 1)


def test_first_line_of_a_foreign_error():
    # Many libraries write paragraphs; some write nothing.
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"
    # The key alone would tell nothing.
    assert first_line(KeyError("added_tokens")) == 'a file without the key "added_tokens"'
    assert len(first_line(ValueError("x" * 5000))) == 300
