import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from spawned import run_ranks

from labkit.models.config import ModelConfig
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.sharding.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from labkit.parallel.sharding.layout_training import LayoutTraining
from labkit.parallel.sharding.layouts import Layout
from labkit.parallel.sharding.shards import full, parts

CONFIG = ModelConfig(layers=4, width=16, heads=4, context=8, vocabulary=64)
IDS = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(1))
TARGETS = IDS.roll(1, 1)
CPU = torch.device("cpu")
TWO = [Layout(pipeline=2), Layout(tensor=2), Layout(data=2)]
FOUR = [
    Layout(tensor=4, sequence=True),
    Layout(data=2, tensor=2),
    Layout(pipeline=2, tensor=2),
    Layout(pipeline=2, data=2),
    Layout(data=2, tensor=2, data_style="copies"),
    Layout(pipeline=4),
]


def moments(training):
    """Every tensor of AdamW's state, whole, on every rank."""
    found = {}
    for part in parts(training.model):
        for key, value in training.optimizer.state[part.parameter].items():
            whole = full(value, part) if value.ndim else value.clone()
            found[f"{part.name}.{key}"] = whole
    return training._whole(found)


def everything(training):
    return {**training.full_parameters(), **moments(training)}


def _write(rank, layouts, folder):
    """Two steps in each layout, a checkpoint, and the loss of the third step."""
    for number, layout in enumerate(layouts):
        training = LayoutTraining(CONFIG, layout, layout.mesh("cpu"), CPU)
        for _ in range(2):
            training.step(IDS, TARGETS)
        home = Path(folder, f"{layout.ranks}-{number}")
        save_checkpoint(home, 2, training.model, training.optimizer)
        state = everything(training)
        loss = training.backward(IDS, TARGETS)
        if rank == 0:
            torch.save((state, loss), home / "expected")


def _read(rank, layouts, homes):
    for layout in layouts:
        training = LayoutTraining(CONFIG, layout, layout.mesh("cpu"), CPU, seed=7)
        for home in homes:
            assert load_checkpoint(home, training.model, training.optimizer) == 2
            state, loss = torch.load(home / "expected")
            found = everything(training)
            assert state.keys() == found.keys()
            wrong = [name for name in state if not torch.equal(state[name], found[name])]
            assert not wrong, f"{home.name} -> {layout}: {wrong[:3]}"
            assert training.step(IDS, TARGETS) == pytest.approx(loss, rel=1e-6), str(layout)


def test_every_layout_resumes_from_every_other_bit_for_bit(tmp_path):
    run_ranks(_write, 1, [Layout()], tmp_path)
    run_ranks(_write, 2, TWO, tmp_path)
    run_ranks(_write, 4, FOUR, tmp_path)
    assert len(list(tmp_path.iterdir())) == 10
    homes = sorted(tmp_path.iterdir())
    run_ranks(_read, 1, [Layout()], homes)
    # what one device reads bit for bit is one and the same state: a few stand for all
    some = [homes[0], homes[1], homes[5]]
    assert [home.name for home in some] == ["1-0", "2-0", "4-1"]
    run_ranks(_read, 2, TWO, some)
    run_ranks(_read, 4, FOUR, some)


def plain(seed=0, config=CONFIG, **settings):
    """A model of one process without ``torch.distributed``, after one step."""
    model = Transformer(config, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    next_token_loss(model(IDS), TARGETS).backward()
    optimizer.step()
    return model, optimizer


def test_without_ranks_a_checkpoint_brings_weights_moments_and_settings_back(tmp_path):
    model, optimizer = plain(lr=0.02)
    assert latest_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, 1, model, optimizer)
    other, its_optimizer = plain(seed=3)
    assert load_checkpoint(tmp_path, other, its_optimizer) == 1
    assert its_optimizer.param_groups[0]["lr"] == 0.02
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
        state, its_state = optimizer.state[mine], its_optimizer.state[theirs]
        assert all(torch.equal(state[key], its_state[key]) for key in state), name


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_the_difference(tmp_path):
    save_checkpoint(tmp_path, 1, *plain())
    before = Transformer(CONFIG.with_(layers=1))
    with pytest.raises(ValueError, match="layers 4 in the checkpoint, 1 here"):
        load_checkpoint(tmp_path, before, torch.optim.AdamW(before.parameters()))
    with pytest.raises(ValueError, match="heads 4 in the checkpoint, 2 here"):
        load_checkpoint(tmp_path, *plain(config=CONFIG.with_(heads=2)))
    model = Transformer(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="exp_avg.* in the checkpoint, nothing here"):
        load_checkpoint(tmp_path, model, optimizer)


def test_a_folder_without_a_whole_checkpoint_and_a_second_one_of_a_step_are_refused(tmp_path):
    model, optimizer = plain()
    with pytest.raises(ValueError, match="no whole checkpoint"):
        load_checkpoint(tmp_path, model, optimizer)
    save_checkpoint(tmp_path, 1, model, optimizer)
    with pytest.raises(ValueError, match="step-00000001 is there already"):
        save_checkpoint(tmp_path, 1, model, optimizer)


def _killed_while_saving(rank, folder):
    training = LayoutTraining(CONFIG, Layout(tensor=2), Layout(tensor=2).mesh("cpu"), CPU)
    training.step(IDS, TARGETS)
    save_checkpoint(folder, 1, training.model, training.optimizer)
    training.step(IDS, TARGETS)
    if rank == 1:
        write = dcp.FileSystemWriter.write_data

        def write_and_die(*args):
            write(*args).wait()
            os.kill(os.getpid(), signal.SIGKILL)

        dcp.FileSystemWriter.write_data = write_and_die
    save_checkpoint(folder, 2, training.model, training.optimizer)


def test_a_kill_while_saving_leaves_the_checkpoint_before_whole(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        run_ranks(_killed_while_saving, 2, tmp_path)
    assert any(path.name.startswith(".saving-") for path in tmp_path.iterdir())
    model, optimizer = plain(seed=5)
    assert load_checkpoint(tmp_path, model, optimizer) == 1
    save_checkpoint(tmp_path, 2, model, optimizer)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]
