import pytest

from labkit.models.config import PRESETS, ModelConfig, preset
from labkit.models.transformer import Transformer


def test_width_that_heads_do_not_divide_names_both_and_the_next_legal_widths():
    with pytest.raises(ValueError, match="width=100.*heads=3.*width=99.*width=102"):
        ModelConfig(layers=1, width=100, heads=3, context=8)


@pytest.mark.parametrize("field", ["layers", "width", "heads", "context", "vocabulary"])
def test_a_size_below_one_is_named(field):
    sizes = dict(layers=1, width=8, heads=2, context=8) | {field: 0}
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        ModelConfig(**sizes)


@pytest.mark.parametrize("name", ["tiny", "workshop"])
def test_the_number_of_parameters_is_exact(name):
    config = PRESETS[name].model
    assert config.num_parameters == sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_splits_into_four_stages_of_two_chunks_and_four_head_groups(name):
    config = preset(name).model
    assert config.layers % 8 == 0 and config.heads % 4 == 0


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(ValueError, match="'huge'.*tiny, workshop, workstation"):
        preset("huge")
