"""Models from disk: what loads, what is refused with which advice, and the real one's answer."""

from __future__ import annotations

import pytest

from labkit.models import pretrained
from labkit.models.pretrained import load_pretrained, packaged_file, why_not_pretrained

needs_extra = pytest.mark.skipif(why_not_pretrained() is not None, reason=str(why_not_pretrained()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a small random Llama and its tokenizer."""
    transformers = pytest.importorskip(
        "transformers", reason="needs the extra: pip install '.[pretrained]'"
    )
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("model") / "small"
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"hello": 0, "<end>": 1}, unk_token="hello"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_with_safetensors_loads(saved):
    model = load_pretrained(saved)
    assert (model.name, model.decoder.shape.layers, model.stop) == ("small", 1, (1,))
    assert model.text(model.encode("hello")) == "hello"


def test_a_model_without_a_chat_template_says_so(saved):
    with pytest.raises(ValueError, match="small has no chat template"):
        load_pretrained(saved).question("Who are you?")


def test_a_folder_of_another_family_is_refused_before_its_weights_are_read(saved, tmp_path):
    import json

    config = json.loads((saved / "config.json").read_text()) | {"model_type": "gpt_neox"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match="model_type='gpt_neox' is not supported"):
        load_pretrained(tmp_path)


def test_a_path_without_a_model_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="lacks config.json or"):
        load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no .gguf file and no folder"):
        load_pretrained(tmp_path / "missing.gguf")


def test_what_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(pretrained, "PACKAGE", "no_such_package")
    assert "no_such_package" in why_not_pretrained()
    with pytest.raises(ValueError, match="run make execute-notebooks or make lab once"):
        load_pretrained()


@needs_extra
def test_the_packaged_model_answers_a_question_however_its_layers_are_spread(capfd):
    from labkit.parallel.generation.generate import generate
    from labkit.parallel.generation.runners import ManyDevices
    from labkit.parallel.generation.tensor_shards import check_divisible

    model = load_pretrained()
    assert model.name == packaged_file().stem
    assert capfd.readouterr() == ("", "")  # no progress bars in a notebook
    prompts = [
        model.question(f"What is the capital of {c}?") for c in ("France", "the Netherlands")
    ]
    for devices in (1, 2, 4):
        spread = ManyDevices(model.decoder, ["cpu"] * devices)
        made = generate(spread, prompts, new_tokens=12, stop=model.stop, groups=min(devices, 2))
        assert [model.text(tokens) for tokens in made.tokens] == [
            "The capital of France is Paris.",
            "The capital of the Netherlands is Amsterdam.",
        ]
        assert made.stopped == (True, True)
    for ranks in (2, 4):
        with pytest.raises(ValueError, match=f"heads=9 and kv_heads=3 .* t={ranks} .* are 1, 3"):
            check_divisible(model.decoder.shape, ranks)
