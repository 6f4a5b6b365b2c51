"""Models of ``transformers`` as decoders: their logits, in every supported family."""

from __future__ import annotations

import pytest
import torch

from labkit.models.huggingface import FAMILIES, huggingface_decoder, random_model
from labkit.models.kv_cache import decode, prefill

transformers = pytest.importorskip(
    "transformers", reason="needs the extra: pip install '.[pretrained]'"
)
CPU = torch.device("cpu")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_its_own_logits_for_a_batch_of_unequal_prompts(family):
    model = random_model(family)
    decoder = huggingface_decoder(model)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    cache = decoder.new_cache(rows=2, columns=8)
    ids = torch.tensor([prompts[0], [*prompts[1], 0, 0]])
    logits_BV = decoder(ids, cache, prefill([5, 3], CPU))
    for new in (11, 12):
        check(model, prompts, logits_BV)
        step = decode([len(prompt) for prompt in prompts], CPU)
        logits_BV = decoder(torch.tensor([[new], [new + 9]]), cache, step)
        prompts = [[*prompts[0], new], [*prompts[1], new + 9]]
    check(model, prompts, logits_BV)


def check(model, prompts, logits_BV):
    for prompt, row in zip(prompts, logits_BV, strict=True):
        expected = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, expected, rtol=2e-5, atol=2e-4)


def test_another_family_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="model_type='gpt_neox' .* llama, mistral, qwen2, gpt2"):
        huggingface_decoder(random_model("gpt_neox"))


def test_a_setting_that_is_not_followed_is_refused():
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        huggingface_decoder(random_model("llama", hidden_act="gelu"))
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx=True"):
        huggingface_decoder(random_model("gpt2", scale_attn_by_inverse_layer_idx=True))


def test_a_sliding_window_limits_the_context():
    decoder = huggingface_decoder(random_model("mistral", sliding_window=16))
    with pytest.raises(ValueError, match="context of 16"):
        decoder.new_cache(rows=1, columns=17)
