import random
from collections import deque

import numpy as np
import pytest
import torch
from helpers.errors import refused
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from fl_lightning.client.taps import Taps
from fl_lightning.client.transient import Places, Transient, check_state, hooks_undone, settings_undone
from fl_lightning.errors import ClientError
from fl_lightning.state import tensors


class Messy(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
        self.net[1].eval()
        self.number, self.text, self.nothing = 1, "a", None
        self.tensor, self.array = torch.zeros(2), np.zeros(2)
        self.list, self.dict, self.queue = [torch.zeros(1)], {"a": [1]}, deque([1], maxlen=2)
        self.pair = (torch.zeros(1), "b")
        self.generator, self.random = torch.Generator(), random.Random(0)
        self.rng = np.random.default_rng(0)
        self.seen = MeanMetric()
        self.statistics = [self.net[1].running_mean]
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("nobody", None, persistent=False)

    def change(self):
        self.train()
        self.net.requires_grad_(False)
        self.number, self.text, self.nothing, self.new = 2, "c", 3, 4
        self.tensor += 1
        self.array += 1
        self.list[0] += 1
        self.list.append(2)
        self.dict["a"].append(2)
        self.queue.append(2)
        self.pair[0].add_(1)
        self.seen.update(3.0)
        self.cache, self.nobody = self.cache + 1, torch.ones(1)
        return self.draws()

    def draws(self):
        return float(torch.rand((), generator=self.generator)), self.random.random(), self.rng.random()


def test_everything_outside_of_the_state_is_restored_as_often_as_wanted():
    module = Messy()
    saved, first = Transient(module), None
    for _ in range(3):
        drawn = module.change()
        first = first or drawn
        assert drawn == first
        saved.restore()
        assert (module.number, module.text, module.nothing, hasattr(module, "new")) == (1, "a", None, False)
        assert [float(t.sum()) for t in (module.tensor, module.cache, module.list[0], module.pair[0])] == [0] * 4
        assert len(module.list) == 1 and module.dict == {"a": [1]} and list(module.queue) == [1]
        assert module.queue.maxlen == 2 and module.array.sum() == 0 and module.nobody is None
        assert module.seen._update_count == 0 and float(module.seen.mean_value) == 0
        assert module.training and not module.net[1].training and module.net[2].training
        assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_tensor_is_restored_in_place_and_the_state_is_left_alone():
    module = Messy()
    saved, tensor, buffer = Transient(module), module.tensor, module.cache
    module.tensor += 1
    module.cache += 1
    with torch.no_grad():
        module.net[0].weight.fill_(7)
        module.net[1].running_mean.fill_(7)
    saved.restore()
    assert module.tensor is tensor and module.cache is buffer and float(tensor.sum() + buffer.sum()) == 0
    assert module.statistics[0] is module.net[1].running_mean
    assert bool((module.net[0].weight == 7).all()) and bool((module.net[1].running_mean == 7).all())


class Average:
    """Averaged weights, in an object that torch knows nothing of."""

    def __init__(self, net):
        self.shadow, self.updates, self.itself = {"w": torch.zeros(2)}, 0, self
        self.net = net


def test_a_module_in_a_list_and_an_object_are_restored_in_place():
    module = nn.Linear(2, 2)
    module.teacher, module.average = [nn.BatchNorm1d(2).eval()], Average(nn.Linear(2, 2))
    saved, teacher, average = Transient(module), module.teacher[0], module.average
    with torch.no_grad():
        for value in (teacher.weight, teacher.running_mean, average.net.bias, module.bias, average.shadow["w"]):
            value.fill_(7)
    teacher.train().requires_grad_(False)
    average.updates, average.new = 1, 1
    saved.restore()
    assert module.teacher[0] is teacher and module.average is average.itself is average
    assert not any(bool((value == 7).any()) for value in (teacher.weight, teacher.running_mean, average.net.bias))
    assert not teacher.training and teacher.weight.requires_grad
    assert average.updates == 0 and not hasattr(average, "new") and float(average.shadow["w"].sum()) == 0
    assert bool((module.bias == 7).all())


def test_data_are_not_looked_into():
    module = nn.Linear(2, 2)
    module.data = TensorDataset(torch.zeros(2))
    module.data.extra = extra = Average(None)
    saved = Transient(module)
    extra.updates = 1
    saved.restore()
    assert extra.updates == 1


def test_a_scripted_layer_is_refused_by_name():
    module = nn.Sequential(nn.Linear(2, 2))
    module.append(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))
    with refused("model=Sequential", "torch.jit"):
        check_state(module, tensors(module))


def test_a_complex_parameter_is_refused_by_name():
    module = nn.Linear(2, 2, dtype=torch.complex64)
    with refused("model=Linear"):
        check_state(module, tensors(module))


class Rebinding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("later", None)
        self.norm = nn.BatchNorm1d(2)


def test_a_rebound_buffer_is_read_into_the_tensor_of_the_run():
    module = Rebinding()
    live = tensors(module)
    buffers = Places(module, live)
    module.mean = module.mean + 1
    buffers.settle()
    assert module.mean is live["mean"] and live["mean"].tolist() == [1, 1]
    module.mean = module.mean + 1
    buffers.bind()
    assert module.mean is live["mean"] and live["mean"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", torch.zeros(3)), ("mean", torch.zeros(2, dtype=torch.int64)), ("mean", None), ("later", torch.zeros(1))],
)
def test_a_buffer_that_becomes_another_is_refused_by_name(name, value):
    module = Rebinding()
    buffers = Places(module, tensors(module))
    setattr(module, name, value)
    with refused(name, kind=ClientError):
        buffers.settle()


def test_a_state_dict_that_leaves_out_what_is_trained_is_refused():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(1, 1), nn.Linear(1, 1)

        def state_dict(self, *args, **kwargs):
            return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k.startswith("head")}

    module = Partial()
    with refused("inner.weight", "inner.bias", "state_dict"):
        check_state(module, tensors(module))
    module.inner.requires_grad_(False)
    check_state(module, tensors(module))


def test_a_state_dict_with_something_that_is_no_tensor_is_refused():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    module = Extra(1, 1)
    with refused("_extra_state", "state_dict"):
        check_state(module, tensors(module))


def test_objects_stay_the_same_ones_since_others_refer_to_them():
    module = Messy()
    module.net.alias, generator, array, inner = module.list, module.generator, module.array, module.dict["a"]
    saved = Transient(module)
    module.change()
    module.list, module.generator = [], torch.Generator()
    saved.restore()
    assert module.list is module.net.alias and len(module.list) == 1
    assert module.generator is generator and module.array is array and module.dict["a"] is inner


class Holder:
    """An object of the user's own that holds what it is given."""

    def __init__(self, **held):
        vars(self).update(held)


def test_an_object_has_its_attributes_again():
    module, other = nn.Module(), object()
    module.holder = Holder(count=0, values=[torch.zeros(1)], other=other)
    saved = Transient(module)
    module.holder.count, module.holder.other = 1, None
    module.holder.values[0] += 1
    saved.restore()
    assert module.holder.count == 0 and module.holder.other is other and float(module.holder.values[0]) == 0


def test_a_module_outside_of_the_state_is_restored():
    module = nn.Module()
    hidden = nn.BatchNorm1d(1)
    module.hidden = [hidden]
    saved = Transient(module)
    hidden.train(False)
    hidden.running_mean.fill_(3)
    hidden.running_var = torch.zeros(1)
    saved.restore()
    assert hidden.training and float(hidden.running_mean) == 0 and float(hidden.running_var) == 1


def test_tensors_that_cannot_be_written_are_left_alone():
    module = nn.Module()
    with torch.inference_mode():
        module.table = torch.ones(2)
    module.mask, module.computed = torch.ones(1).expand(3), torch.ones(1, requires_grad=True) * 2
    saved, before = Transient(module), dict(vars(module))
    module.mask = module.computed = module.table = None
    for _ in range(2):
        saved.restore()
    assert all(vars(module)[name] is before[name] for name in ("mask", "computed", "table"))


def test_buffers_that_change_places():
    module = nn.Module()
    module.register_buffer("one", torch.tensor([1.0]))
    module.register_buffer("two", torch.tensor([2.0]))
    live = tensors(module)
    places = Places(module, live)
    module.one, module.two = module.two, module.one
    places.settle()
    assert [float(live[name]) for name in ("one", "two")] == [2, 1]


def test_hooks_of_a_visit_are_removed_and_those_of_taps_stay():
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *args: None)
    module.bias.register_hook(lambda gradient: None)
    with hooks_undone(module):
        module.register_forward_hook(lambda *args: None)
        module.register_full_backward_hook(lambda *args: None)
        module.bias.register_hook(lambda gradient: gradient * 2)
        module.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))
        nn.modules.module.register_module_forward_pre_hook(lambda *args: None)
        taps = Taps(nn.Sequential(module), {"out": "0"})
    assert len(module._forward_hooks) == 2 and not module._backward_hooks
    assert len(module.bias._backward_hooks) == 1 and not module.weight._post_accumulate_grad_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    taps.remove()
    assert len(module._forward_hooks) == 1


def test_settings_of_the_process_that_a_visit_changes_are_put_back():
    def now():
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()

    before = now()
    with settings_undone():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        assert now() == (torch.float64, False, True)
    assert now() == before


class Extra(nn.Linear):
    """Gives a tensor of its own to the state dict, which is made anew by each call."""

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        pass


def coordinates():
    module = nn.Linear(2, 2)
    module.register_buffer("adjacency", torch.eye(2).to_sparse())
    return module


@pytest.mark.parametrize(("make", "entry"), [(lambda: Extra(2, 2), "_extra_state"), (coordinates, "adjacency")])
def test_an_entry_that_cannot_be_averaged_is_refused_by_name(make, entry):
    module = make()
    with refused("model=", entry):
        check_state(module, tensors(module))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.mean.resize_(3), ("mean", "(3,)", "(2,)", "persistent=False")),
        (
            lambda module: setattr(module.weight, "data", module.weight.data.half()),
            ("weight", "torch.float16", "torch.float32"),
        ),
        (lambda module: delattr(module, "mean"), ("mean", "None", "(2,)", "persistent=False")),
        (lambda module: delattr(module, "weight"), ("weight",)),
    ],
)
def test_a_state_that_is_changed_in_place_is_refused_by_name_and_put_back(change, message):
    module = nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(2))
    live = tensors(module)
    places = Places(module, live)
    before = {name: (value.shape, value.dtype) for name, value in live.items()}
    change(module)
    with refused(*message, kind=ClientError):
        places.settle()
    places.bind()
    assert {name: (value.shape, value.dtype) for name, value in module.state_dict().items()} == before
