"""Faults of groups on GPUs that show on a CPU."""

import weakref

import pytest
import torch
from helpers.runs import small_data, small_trainer, train
from helpers.tiny import TinyData, TinyModule, clients

from fl_lightning.training.local_training import LocalTraining
from fl_lightning.vectorized.group import Group


def test_nothing_of_a_group_that_failed_is_in_memory_while_its_clients_train_one_by_one(tmp_path, monkeypatch):
    groups, alive, take_steps, visit = [], [], Group._take_steps, LocalTraining.visit

    def fail(group, *args):
        if group.size == 2:  # the trial before round 0
            return take_steps(group, *args)
        groups.append(weakref.ref(group))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def watched(*args):
        if groups:  # after the trial
            alive.append(groups[-1]() is not None)
        return visit(*args)

    monkeypatch.setattr(Group, "_take_steps", fail)
    monkeypatch.setattr(LocalTraining, "visit", watched)
    with pytest.warns(UserWarning, match="sequentially"):
        train(tmp_path, data=small_data(num_clients=4), clients_per_step=4, max_rounds=1)
    assert alive == [False] * 4


def test_clients_whose_dropout_draws_on_a_gpu_do_not_share_a_program_unasked(tmp_path, monkeypatch):
    generator = torch.Generator()

    class Drops(TinyModule):
        def loss(self, batch):
            x, y = batch
            keep = torch.rand(x.shape[-1:], generator=generator) > 0.5 if self.training else 1.0
            return super().loss((x * keep, y))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    trainer = small_trainer(tmp_path, max_rounds=1, devices=1)
    trainer.fit(Drops(), clients(TinyData(48), *[6] * 8))
    assert "random numbers" in trainer.run.runner.reason
