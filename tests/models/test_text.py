import pytest
import torch

from labkit.models.text import load_text, text_from_bytes


def test_the_standard_library_gives_real_english():
    text = load_text()
    assert len(text.ids_N) > 200_000
    assert b"statement" in bytes(text.ids_N.tolist())


def test_a_target_is_the_byte_after_its_input():
    text = text_from_bytes(bytes(range(65, 91)), "alphabet")
    x, y = text.batch(batch=4, context=5, step=0)
    assert x.shape == y.shape == (4, 5)
    assert torch.equal(x + 1, y)


def test_the_same_step_and_seed_give_the_same_batch_and_others_do_not():
    text = load_text()
    first = text.batch(4, 16, step=7)[0]
    assert torch.equal(first, text.batch(4, 16, step=7)[0])
    assert not torch.equal(first, text.batch(4, 16, step=8)[0])
    assert not torch.equal(first, text.batch(4, 16, step=7, seed=1)[0])


def test_every_window_of_the_text_can_be_drawn_and_none_beyond_it():
    text = text_from_bytes(b"abcd", "four bytes")
    starts = {text.batch(1, 2, step)[0][0, 0].item() for step in range(50)}
    assert starts == {ord("a"), ord("b")}


def test_a_file_of_the_readers_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Grüße, " * 10, encoding="utf-8")
    assert load_text(file).source == "mine.txt"


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "is not there or no file"),
        (b"", "mine.txt is empty"),
        (b"abc\xffdef", r"not UTF-8 at byte 3 \(0xff\)"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, content, message):
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(file)


def test_a_text_shorter_than_one_sequence_says_how_long_it_must_be():
    with pytest.raises(ValueError, match="4 bytes; context=4 needs at least 5"):
        text_from_bytes(b"abcd", "short").batch(1, 4, 0)
