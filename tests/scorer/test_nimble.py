from tests.scorer.qwen_vocabulary import tiktoken_encode

def test_x() -> None:
    assert tiktoken_encode("x")
