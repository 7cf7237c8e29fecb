"""What must hold if the idea of a method is right; each fails for a wrong sign or a missing factor."""

import copy
from functools import partial

import pytest
import torch
from conftest import assert_same_bits, differs, small_data, small_model
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Method
from fl_lightning.data import IID, Dirichlet
from fl_lightning.errors import UsageError
from fl_lightning.functional import calibrated_logits, correlation_frobenius, linear_cka, rbf_uniformity
from fl_lightning.functional import probability_variance_hinge as hinge
from fl_lightning.methods import FedCKA, FedDecorr, FedLC, FedProx, FedUV
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.seeding import address

NEUTRAL = {
    "fedprox": (FedProx(mu=0), FedProx(mu=1.0), "mlp"),
    "fedlc": (FedLC(tau=0), FedLC(tau=1.0), "mlp"),
    "fedcka": (FedCKA(mu=0), FedCKA(mu=3.0), "cnn"),
    "feduv": (FedUV(mu=0, lambda_=0), FedUV(), "mlp"),
    "feddecorr": (FedDecorr(beta=0), FedDecorr(), "mlp"),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_neutral_coefficient_is_fedavg_bit_for_bit_and_another_is_not(run, name):
    neutral, strong, kind = NEUTRAL[name]
    plain, _ = run([], kind)
    assert_same_bits(run([neutral], kind)[0], plain)
    assert differs(run([strong], kind)[0], plain)


def test_one_client_with_full_participation_is_central_training(run):
    """Three rounds of one client are three epochs of a plain loop over the same batches, bit for bit."""
    model = ImageClassifier(MLP(64, [32]), optimizer=partial(SGD, lr=0.1))
    central = copy.deepcopy(model)
    data = small_data(num_clients=1, partitioner=IID())
    state, trainer = run(model=model, data=data, max_rounds=3)
    optimizer = SGD(central.parameters(), lr=0.1)
    for round_ in range(3):
        loader = data.train_dataloader(0)
        loader.generator.manual_seed(address(trainer.seed, "batches", round_, 0))
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(central(x), y).backward()
            optimizer.step()
    assert_same_bits(state, central.state_dict())


def test_the_global_state_is_the_mean_of_the_clients_by_examples(run, tmp_path):
    """FedAvg of three clients is sum n_k y_k / n, rounded once."""
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1))
    start = copy.deepcopy(model)
    data = small_data(num_clients=3, partitioner=Dirichlet(0.5))
    state, trainer = run(model=model, data=data, max_rounds=1)
    total = 0.0
    for k in range(3):
        local, loader = copy.deepcopy(start), data.train_dataloader(k)
        loader.generator.manual_seed(address(trainer.seed, "batches", 0, k))
        optimizer = SGD(local.parameters(), lr=0.1)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(local(x), y).backward()
            optimizer.step()
        total = total + data.info(k).num_examples * local.classifier.weight.detach().double()
    assert torch.equal(state["classifier.weight"], (total / 400).float())


@pytest.mark.parametrize("pair", [(FedProx(0.1), FedDecorr(0.1)), (FedUV(), FedDecorr(0.1)), (FedUV(), FedProx(0.1))])
def test_two_penalties_commute(run, pair):
    first, second = (run(list(order))[0] for order in (pair, pair[::-1]))
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=2e-4, rtol=2e-3)
    assert differs(first, run([pair[0]])[0])


def test_fedprox_keeps_the_client_nearer_and_in_the_limit_still(run):
    drifts = [run([FedProx(mu)], max_rounds=1)[1].metrics["drift/client"] for mu in (0.0, 1.0, 5.0)]
    assert drifts[0] > drifts[1] > drifts[2]


def test_fedprox_on_a_quadratic_stops_at_the_proximal_point(run):
    """min a/2 (y - b)^2 + mu/2 (y - w)^2 is at (a b + mu w) / (a + mu)."""
    from test_trainer import Quadratic, quadratic_data

    model = Quadratic(start=2.0)
    _, trainer = run([FedProx(mu=3.0)], model=model, data=quadratic_data([-1.0]), max_rounds=1, local_steps=200)
    assert model.y.item() == pytest.approx((1 * -1.0 + 3 * 2.0) / 4, abs=1e-5)
    assert trainer.metrics["train/fedprox"] == pytest.approx(1.5 * (model.y.item() - 2.0) ** 2, rel=1e-4)


def test_fedlc_margins_differ_between_clients_and_are_larger_for_rare_classes():
    logits = torch.zeros(1, 3)
    first = calibrated_logits(logits, torch.tensor([100, 1, 10]))
    second = calibrated_logits(logits, torch.tensor([1, 100, 10]))
    assert not torch.equal(first, second)
    assert first[0, 0] > first[0, 2] > first[0, 1]


def test_fedlc_without_labels_is_refused_before_round_0(run):
    from test_trainer import Quadratic, quadratic_data

    data, model = quadratic_data([1.0, 2.0]), Quadratic()
    model.head = torch.nn.Identity()
    data.datamodule.train_dataloader = lambda: DataLoader(TensorDataset(torch.ones(4)))
    with pytest.raises(UsageError, match="method='FedLC': the clients' label counts are not known"):
        run([FedLC()], model=model, data=data, taps={"logits": "head"})


def test_fedlc_is_not_applied_in_evaluation(run):
    _, trainer = run([FedLC(tau=50.0)], max_rounds=0)
    plain = run([], max_rounds=0)[1]
    assert trainer.evaluate("test") == plain.evaluate("test")


def test_fedlc_literal_equation_leaves_the_true_class_out():
    logits, targets, counts = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([3, 4, 5, 60])
    client = type("C", (), {"info": type("I", (), {"label_counts": counts})})
    from fl_lightning.method import Step

    method = FedLC(tau=0.5, denominator="exclude_true")
    lowered = logits.double() - 0.5 * counts.double() ** -0.25
    literal = torch.stack(
        [torch.logsumexp(row[torch.arange(4) != y], 0) - row[y] for row, y in zip(lowered, targets, strict=True)]
    ).mean()
    ours = torch.nn.functional.cross_entropy(method.transform_logits(client, logits), targets)
    ours = ours + method.penalty(client, Step(None, targets, {"logits": logits}))
    assert ours.item() == pytest.approx(literal.item(), rel=1e-5)


def test_fedcka_is_absent_in_the_first_visit_and_there_in_the_second(run):
    _, trainer = run([FedCKA()], "cnn", max_rounds=2)
    assert ["train/fedcka" in row for row in trainer.history] == [False, True]
    assert 0.3 * 3 < trainer.history[1]["train/fedcka"] < 1.32 * 3


def test_fedcka_compares_with_the_clients_own_last_model(run):
    seen = {}

    class Spy(FedCKA):
        name = "fedcka"

        def on_client_start(self, client):
            super().on_client_start(client)
            kept = client.memory(self).get("previous")
            if kept is not None:
                assert_same_bits(kept, seen[client.info.id])
                assert differs(kept, client.received)

        def on_client_end(self, client):
            super().on_client_end(client)
            seen[client.info.id] = client.state()

    run([Spy()], "cnn", max_rounds=2)
    assert len(seen) == 4


def test_fedcka_runs_the_references_in_eval_without_gradient_and_only_to_the_second_tap(run):
    seen = []

    class Watch(FedCKA):
        name = "fedcka"

        def penalty(self, client, step):
            for twin, _ in client._references.values():
                if not hasattr(twin, "watched"):
                    twin.watched = True
                    for path, part in twin.named_modules():
                        part.register_forward_hook(
                            lambda m, a, out, path=path: seen.append((path, m.training, torch.is_grad_enabled()))
                        )
            return super().penalty(client, step)

    run([Watch()], "cnn", max_rounds=2)
    paths = {path for path, _, _ in seen}
    assert "encoder.layers.2.0" in paths
    assert not [path for path in paths if path.startswith(("encoder.layers.3", "encoder.layers.5", "classifier"))]
    assert not any(training or grad for _, training, grad in seen)


def test_fedcka_pulls_towards_the_global_model():
    """The gradient of the term raises the similarity to the global model and lowers that to the previous one."""
    from fl_lightning.functional import representation_contrast

    torch.manual_seed(0)
    a, to_global, to_previous = (torch.randn(12, 5) for _ in range(3))
    a.requires_grad_()
    before = linear_cka(a, to_global) - linear_cka(a, to_previous)
    representation_contrast(linear_cka(a, to_global), linear_cka(a, to_previous)).backward()
    moved = a - 0.1 * a.grad / a.grad.norm()
    assert linear_cka(moved, to_global) - linear_cka(moved, to_previous) > before


def descend(loss, z, steps=60, lr=0.5):
    z = z.clone().requires_grad_()
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(loss(z), z)
        z = (z - lr * gradient).detach().requires_grad_()
    return z.detach()


def test_descending_feddecorr_decorrelates():
    mixed = torch.randn(64, 6) @ torch.randn(6, 6)

    def off(z):
        return torch.corrcoef(z.T).fill_diagonal_(0).abs().mean()

    assert off(descend(correlation_frobenius, mixed, steps=500, lr=2.0)) < 0.1 * off(mixed)


def test_descending_feduv_spreads_representations_and_predictions():
    z = torch.randn(32, 2)

    def uniformity(x):
        return rbf_uniformity(x, detach_bandwidth=True)

    assert torch.pdist(descend(uniformity, z)).min() > torch.pdist(z).min()
    logits = 0.1 * torch.randn(32, 5)
    assert descend(hinge, logits, lr=20).softmax(1).std(0).mean() > 2 * logits.softmax(1).std(0).mean()


def test_feduv_lambda_none_is_a_quarter_of_the_classes(run):
    assert_same_bits(run([FedUV()])[0], run([FedUV(lambda_=2.5)])[0])


@pytest.mark.parametrize("method", [FedUV(), FedDecorr(), FedLC(), FedCKA()])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_of_one_and_two_stay_finite(run, method, batch_size):
    model = ImageClassifier(MLP(64, [32, 16])) if not isinstance(method, FedCKA) else small_model("cnn")
    kind = "cnn" if isinstance(method, FedCKA) else "mlp"
    data = small_data(kind, batch_size=batch_size, train_size=40)
    state, _ = run([method], model=model, data=data, max_rounds=2)
    assert all(torch.isfinite(value).all() for value in state.values())


@pytest.mark.parametrize("missing", ["floor", "mask", "clamp"])
def test_fedlc_with_missing_classes_trains_under_bf16(run, missing):
    data = small_data(partitioner=Dirichlet(0.05))
    data.setup()
    assert (data.plan.label_counts == 0).any()
    state, trainer = run([FedLC(missing=missing)], data=data, precision="bf16-mixed")
    assert all(torch.isfinite(value).all() for value in state.values())
    assert trainer.metrics["train/loss"] > 0


def test_partition_cohort_batches_and_initial_weights_do_not_depend_on_the_method(run):
    """Methods that are compared on one seed see the same of everything that is drawn."""
    orders = []

    class Drawing(Method):
        def on_client_start(self, client):
            torch.rand(7)

        def penalty(self, client, step):
            torch.rand(3)
            orders[-1].append(step.targets.tolist())

    class Watching(Method):
        def penalty(self, client, step):
            orders[-1].append(step.targets.tolist())

    for method in (Drawing(), Watching()):
        orders.append([])
        run([method], participation=0.5, max_rounds=3)
    assert orders[0] == orders[1]
