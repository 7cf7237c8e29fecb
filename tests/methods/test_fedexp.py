"""FedExP's server rate: its value in cases with a closed form, and the model that it evaluates."""

import pytest
import torch
from helpers.quadratics import Rows
from helpers.runs import assert_same_bits
from helpers.softmax_regression import assert_printed, fit
from helpers.tiny import clients
from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning import Method
from fl_lightning.methods import FedExP


class Linear(LightningModule):
    """f_k(y) = -<y, b>, whose steps of SGD are ``lr`` times the mean b of the batch."""

    def __init__(self, size, lr=0.1):
        super().__init__()
        self.y, self.own, self.lr = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(1)), lr

    def training_step(self, batch, batch_idx):
        return -(batch[0] @ self.y).mean() - 3 * self.own.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class KeepsOwn(Method):
    def exchanges(self, key):
        return key != "own"


def along(run, rows, method, sizes=None, lr=0.1, **options):
    """Return the final y of clients that pull along one row each; client k has ``sizes[k]`` copies of its row."""
    sizes = sizes or [1] * len(rows)
    repeated = [row for row, n in zip(rows, sizes, strict=True) for _ in range(n)]
    options = {"max_rounds": 1, **options}
    state, trainer = run(
        [KeepsOwn(), method], model=Linear(len(rows[0]), lr), data=clients(Rows(repeated), *sizes), **options
    )
    return state["y"], trainer.metrics["fedexp/rate"]


def test_the_worked_example(tmp_path):
    seen = []

    class Noted(FedExP):
        name = "fedexp"

        def transform_update(self, server, delta, payload):
            seen.append((float(payload["square"].total) / 2, float(delta["head.weight"].norm()) ** 2))
            return super().transform_update(server, delta, payload)

    assert fit(tmp_path, [FedExP()], names="AB").metrics["fedexp/rate"] == 1
    trainer = fit(tmp_path, [Noted(eps=1e-5)], names="AB")
    assert_printed(torch.tensor(seen[0]), (0.00436870 * 2 + 0.00436560 * 2) / 2, 0.00194911)
    assert trainer.metrics["fedexp/rate"] == pytest.approx(1.11457575, abs=1e-8)
    numbers = (0.10946325, 0.19527540, 0.02666073, -0.10952391, 0.26387602, 0.01424851)
    assert_printed(trainer.server.state["head.weight"], *numbers)


@pytest.mark.parametrize("number", [2, 3, 6])
def test_orthogonal_changes_of_one_norm_have_half_their_number_as_rate(run, number):
    y, rate = along(run, torch.eye(number).tolist(), FedExP(eps=0))
    assert rate == pytest.approx(number / 2)
    torch.testing.assert_close(y, torch.full((number,), 0.1 / 2))


def test_the_clients_weights_are_those_of_the_mean(run):
    """Then the rate is 1 / (2 sum p^2)."""
    y, rate = along(run, torch.eye(3).tolist(), FedExP(eps=0), sizes=[1, 2, 3])
    shares = torch.tensor([1, 2, 3]) / 6
    assert rate == pytest.approx(1 / (2 * float(shares.square().sum())))
    torch.testing.assert_close(y, 0.1 * rate * shares)
    equal = along(run, torch.eye(3).tolist(), FedExP(eps=0), sizes=[1, 2, 3], weighting="uniform")[1]
    assert equal == pytest.approx(1.5)


def test_equal_changes_one_client_and_no_change_have_rate_1(run):
    assert along(run, [[1.0, 2.0]], FedExP(eps=0))[1] == 1
    assert along(run, [[1.0, 2.0]] * 3, FedExP(eps=0))[1] == 1
    y, rate = along(run, torch.eye(2).tolist(), FedExP(eps=0), lr=0.0)
    assert rate == 1 and not y.any()


def test_the_rate_does_not_change_with_the_scale_of_all_changes_without_eps(run):
    rates = {lr: along(run, [[1.0, 0.0], [0.6, 0.8], [-0.6, 0.8]], FedExP(eps=0), lr=lr)[1] for lr in (1.0, 1e-3)}
    assert rates[1.0] == pytest.approx(rates[1e-3], rel=1e-5) and rates[1.0] > 1


def test_eps_counts_once_or_for_each_client_and_decays(run):
    """Of orthogonal steps of norm 0.1, the rate is 0.01 / (2 (0.01 / m + eps))."""
    for options, eps in {
        ("one", 1.0): [1e-4, 1e-4, 1e-4],
        ("cohort", 1.0): [4e-4, 4e-4, 4e-4],
        ("one", 0.5): [1e-4, 5e-5, 2.5e-5],
    }.items():
        for rounds, value in enumerate(eps, 1):
            method = FedExP(1e-4, *options)
            found = along(run, torch.eye(4).tolist(), method, max_rounds=rounds)[1]
            assert found == pytest.approx(0.01 / (2 * (0.01 / 4 + value)), rel=1e-4)


@pytest.mark.parametrize("averages", [True, False])
def test_the_evaluated_parameters_are_the_mean_of_the_last_two_models_and_the_first_is_itself(run, averages):
    states, saved = [], []
    for rounds in (1, 2, 3):
        state, trainer = run([FedExP(eps=0, average_last_two=averages)], max_rounds=rounds)
        states.append(state)
        saved.append(torch.load(trainer.run_dir / "checkpoints/model.ckpt", weights_only=True)["state_dict"])
    assert_same_bits(states[0], saved[0])
    parameters = {name for name, _ in trainer.client.module.named_parameters()}
    for now, before, found in zip(states[1:], states, saved[1:], strict=False):
        for name, value in found.items():
            mean = (now[name] + before[name]) / 2 if averages and name in parameters else now[name]
            assert torch.equal(value, mean), name
