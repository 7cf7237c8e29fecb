"""FedSAM and FedASAM step with the gradient at a nearby point of higher loss."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.errors import warned
from helpers.quadratics import A, B, Curved, curved_data
from helpers.runs import assert_same_bits, differs, small_model
from helpers.softmax_regression import Softmax, assert_printed, fit
from helpers.tiny import TinyData, TinyModule, clients
from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning.core.state import clone
from fl_lightning.methods import MOON, SCAFFOLD, FedASAM, FedBABU, FedProx, FedSAM


def test_the_worked_example_of_sam(tmp_path):
    trainer = fit(tmp_path, [FedSAM(0.1)])
    found = trainer.server.state["head.weight"]
    assert_printed(found, 0.14395379, 0.19636020, -0.00593239, -0.12275156, 0.26197861, 0.02639136)
    assert_printed(torch.tensor(trainer.metrics["train/loss"]), 1.14163805)  # that at y


def test_the_worked_example_of_asam(tmp_path):
    found = fit(tmp_path, [FedASAM()]).server.state["head.weight"]
    assert_printed(found, 0.14624730, 0.19653020, -0.00474234, -0.12272568, 0.25849504, 0.02619548)


def point(method):
    """The move to the point at which a method computes the gradient, with the parameters and their gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes, asked = {"head.weight": (4, 3), "head.bias": (4,)}, []
    live = {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}
    for value in live.values():
        value.grad = torch.randn(value.shape, generator=draw)
    gradients = {name: value.grad.clone() for name, value in live.items()}
    client = SimpleNamespace(live=live, trainable=[*live], gradients=lambda at: asked.append(at) or {})
    method.on_before_optimizer_step(client, None)
    (at,) = asked
    return {name: at[name] - value.detach() for name, value in live.items()}, live, gradients


def length(values):
    return torch.cat([value.reshape(-1) for value in values.values()]).norm()


def test_the_point_of_sam_is_rho_away_along_the_gradient():
    move, _, gradients = point(FedSAM(0.3))
    assert length(move).item() == pytest.approx(0.3)
    for name, value in move.items():
        torch.testing.assert_close(value, 0.3 * gradients[name] / length(gradients))


@pytest.mark.parametrize("adaptive", ["weights", "all"])
def test_the_point_of_asam_is_rho_away_in_units_of_the_scales(adaptive):
    """It is along T^2 g: T is |y| + eta for weights and 1 for biases, or |y| for all."""
    move, live, gradients = point(FedASAM(0.3, 0.1, adaptive))
    scales = {name: value.detach().abs() for name, value in live.items()}
    if adaptive == "weights":
        scales = {"head.weight": scales["head.weight"] + 0.1, "head.bias": torch.ones(4)}
    assert length({name: value / scales[name] for name, value in move.items()}).item() == pytest.approx(0.3)
    along = {name: scales[name] ** 2 * gradient for name, gradient in gradients.items()}
    for name, value in move.items():
        torch.testing.assert_close(value / length(move), along[name] / length(along))


def test_asam_with_equal_scales_is_sam(tmp_path):
    """All weights are 0.8, and T is 1."""
    start = torch.full((3, 2), 0.8, dtype=torch.float64)
    states = [
        fit(tmp_path / kind.name, [kind(0.4)], model=Softmax(start, bias=True)).server.state
        for kind in (FedSAM, FedASAM)
    ]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-12)


class Linear(LightningModule):
    """A loss linear in the parameters."""

    def __init__(self, slope=1.0):
        super().__init__()
        self.y, self.slope = nn.Parameter(torch.ones(3)), slope

    def training_step(self, batch, batch_idx):
        return self.slope * (self.y * batch[0].mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


def test_on_a_linear_loss_the_step_is_that_of_fedavg(run):
    data = partial(curved_data, A, B)
    assert_same_bits(run([], model=Linear(), data=data())[0], run([FedSAM()], model=Linear(), data=data())[0])


@pytest.mark.parametrize("kind", [FedSAM, FedASAM])
def test_a_gradient_of_zero_stays_finite_and_where_it_is(run, kind):
    state, _ = run([kind()], model=Linear(slope=0.0), data=curved_data(A, B))
    assert_same_bits(state, {"y": torch.ones(3)})


def test_on_a_quadratic_the_gradient_is_that_at_the_ascended_point(run):
    """a (y - b) becomes a (y + rho sign(y - b) - b)."""
    state, _ = run([FedSAM(0.25)], model=Curved(lr=0.1), data=curved_data([2.0], [3.0]), max_rounds=1)
    assert state["y"].item() == pytest.approx(0.1 * 2 * (3 + 0.25))


class Normed(TinyModule):
    def build(self):
        self.body.append(nn.BatchNorm1d(6))


def test_running_statistics_are_those_of_the_first_pass(tmp_path, run):
    """After one step they are FedAvg's, since the second pass does not move them."""
    torch.manual_seed(0)
    model, data = Normed(), partial(clients, TinyData(8, batch_size=8))
    plain, sam = (
        run(methods, model=copy.deepcopy(model), data=data(), max_rounds=1)[0] for methods in ([], [FedSAM(1.0)])
    )
    assert differs(plain, sam)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(plain[f"body.2.{name}"], sam[f"body.2.{name}"])


def test_corrections_of_other_methods_are_added_at_y_in_any_order(run):
    """The step uses the gradient at the ascended point, plus mu (y - w)."""
    a, b, rho, mu, lr, y = 2.0, 3.0, 0.25, 0.5, 0.1, 0.0
    for _ in range(2):
        y -= lr * (a * (y - rho - b) + mu * y)
    for methods in ([FedSAM(rho), FedProx(mu)], [FedProx(mu), FedSAM(rho)]):
        data = curved_data([a], [b])
        state, _ = run(methods, model=Curved(lr=lr), data=data, max_rounds=1, local_steps=2)
        assert state["y"].item() == pytest.approx(y, rel=1e-6)


def test_momentum_weight_decay_and_clipping_act_on_the_perturbed_gradient_at_y(run):
    a, b, rho, lr, momentum, decay, clip = 2.0, 3.0, 0.25, 0.1, 0.9, 0.1, 6.25
    y = buffer = 0.0
    for _ in range(3):
        gradient = a * (y - rho - b)
        gradient *= min(1.0, clip / abs(gradient))
        buffer = momentum * buffer + gradient + decay * y
        y -= lr * buffer
    model, data = Curved(lr=lr, momentum=momentum, weight_decay=decay), curved_data([a], [b])
    state, _ = run([FedSAM(rho)], model=model, data=data, max_rounds=1, local_steps=3, gradient_clip_val=clip)
    assert state["y"].item() == pytest.approx(y, rel=1e-5)


def test_a_parameter_whose_gradient_another_method_drops_does_not_move(run):
    model = small_model()
    start = clone(model.state_dict())
    state, _ = run([FedSAM(0.05), MOON(), FedBABU()], model=model)
    for name, value in state.items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, start[name]) == name.startswith("classifier."), name


def test_beside_methods_that_read_gradients_at_y_it_warns(run):
    with warned("FedSAM", "SCAFFOLD"):
        run([FedSAM(), SCAFFOLD("gradients")], max_rounds=1)
