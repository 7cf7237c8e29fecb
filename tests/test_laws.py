"""What must hold if the idea of a method is right; each fails for a wrong sign or a missing factor."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, differs, small_data, small_model
from quadratics import Curved, curved_data, pull, weighted
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Method, Server, Weighted
from fl_lightning.callbacks import Callback
from fl_lightning.data import IID, Dirichlet
from fl_lightning.errors import UsageError
from fl_lightning.functional import (
    calibrated_logits,
    correlation_frobenius,
    covariance_decorrelation,
    linear_cka,
    model_contrastive_loss,
    prototype_distance,
    rbf_uniformity,
    representation_contrast,
    restricted_logits,
    structured_covariance_decorrelation,
)
from fl_lightning.functional import probability_variance_hinge as hinge
from fl_lightning.methods import (
    MOON,
    SCAFFOLD,
    DeCov,
    FedBABU,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDyn,
    FedLC,
    FedNova,
    FedProto,
    FedProx,
    FedRS,
    FedUV,
    Freeze,
    Local,
    StructuredDeCov,
)
from fl_lightning.models import MLP, ImageClassifier, Projector
from fl_lightning.optim import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fl_lightning.seeding import address

NEUTRAL = {
    "moon": (MOON(mu=0), MOON(mu=5.0), "mlp"),
    "fedrs": (FedRS(alpha=1), FedRS(alpha=0.2), "mlp"),
    "fedproto": (FedProto(0, aggregate_weights=True), FedProto(1.0, aggregate_weights=True), "mlp"),
    "decov": (DeCov(weight=0), DeCov(weight=1.0), "mlp"),
    "structureddecov": (StructuredDeCov(weight=0), StructuredDeCov(weight=1.0, groups=4), "mlp"),
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


def test_a_second_tap_of_the_classifier_records_raw_logits_too(run):
    class Watch(Method):
        requires = ("logits", "early.1")

        def penalty(self, client, step):
            assert torch.equal(step.taps["early.1"], step.taps["logits"])

    run([Watch(), FedLC(tau=5.0)], model=ImageClassifier(MLP(64, [16])), max_rounds=1)


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


def test_fedcka_takes_its_layers_by_number_or_by_name(run):
    assert FedCKA(layers=3).requires == ("early.0", "early.1", "early.2")
    by_name = run([FedCKA(layers=["early.0", "early.1"])], "cnn")[0]
    assert_same_bits(by_name, run([FedCKA(layers=2)], "cnn")[0])
    assert differs(by_name, run([FedCKA(layers=["early.0", "early.3"])], "cnn")[0])
    everything = run([FedCKA(layers=7), FedLC()], "cnn")[1]
    assert everything.metrics["train/fedcka"] > 0
    with pytest.raises(UsageError, match=r"FedCKA\.layers=\[\]: give 1 or more"):
        FedCKA(layers=[])


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
            for twin, _ in client.references._twins.values():
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


def test_feduv_with_one_coefficient_is_the_other_term_alone(run):
    """In the first round's first batch both terms see the same numbers as alone."""
    seen = []

    class Spy(Method):
        requires = ("representation", "logits")

        def penalty(self, client, step):
            z, logits = step.taps["representation"].detach(), step.taps["logits"].detach()
            seen.append([term.penalty(client, step).item() for term in (FedUV(0.5, 0), FedUV(0, 2.0), FedUV(0.5, 2.0))])
            assert seen[-1][0] == pytest.approx(0.5 * float(rbf_uniformity(z)))
            assert seen[-1][1] == pytest.approx(2.0 * float(hinge(logits)))
            assert FedUV(0, 0).penalty(client, step) is None

    run([Spy()], max_rounds=1)
    assert all(u + v == pytest.approx(both) for u, v, both in seen)


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


# ---------------------------------------------------------------- heterogeneous quadratics, in closed form
A, B = [1.0, 4.0, 0.5], [-1.0, 2.0, 5.0]


def settle(run, methods, a=A, b=B, sizes=None, batch_size=10_000, start=0.0, lr=0.1, max_rounds=150, **kwargs):
    """Where the global y ends, and the trainer."""
    model, data = Curved(start=start, lr=lr), curved_data(a, b, sizes, batch_size)
    state, trainer = run(methods, model=model, data=data, max_rounds=max_rounds, **kwargs)
    return state["y"].item(), trainer


def test_fedavg_and_fedprox_settle_beside_the_optimum_where_the_closed_form_says(run):
    optimum = weighted(B, A)
    for methods, mu in (([], 0.0), ([FedProx(mu=2.0)], 2.0)):
        fixed = weighted(B, pull(A, 0.1, 5, mu))
        assert settle(run, methods, local_steps=5)[0] == pytest.approx(fixed, abs=1e-5)
        assert abs(fixed - optimum) > 0.05


@pytest.mark.parametrize("method", [SCAFFOLD(), SCAFFOLD(variate="gradients"), FedDyn(alpha=0.5)])
def test_scaffold_and_feddyn_settle_at_the_optimum(run, method):
    assert settle(run, [method], local_steps=5)[0] == pytest.approx(weighted(B, A), abs=1e-4)


def test_scaffold_settles_at_the_optimum_with_half_of_the_clients_a_round(run):
    found, _ = settle(run, [SCAFFOLD()], local_steps=3, cohort_size=2, max_rounds=400)
    assert found == pytest.approx(weighted(B, A), abs=1e-3)


def test_feddyn_weighs_clients_by_examples_when_scaled_and_alike_when_not(run):
    sizes = [2, 1, 6]
    for scaled, weights in ((True, sizes), (False, [1, 1, 1])):
        found, _ = settle(run, [FedDyn(0.5, scaled)], sizes=sizes, local_steps=8, max_rounds=300)
        assert found == pytest.approx(weighted(B, [a * w for a, w in zip(A, weights, strict=True)]), abs=1e-3)


def test_feddyn_first_round_in_closed_form(run):
    """From w = 0 and g = 0, one step: y = lr a b; w' = 2 mean(y), the reported model mean(y), whatever the sizes."""
    model, data = Curved(), curved_data(A, B, sizes=[1, 3, 2])
    state, _ = run([FedDyn(0.5)], model=model, data=data, local_steps=1, max_rounds=1)
    mean = 0.1 * sum(a * b for a, b in zip(A, B, strict=True)) / 3
    assert state["y"].item() == pytest.approx(2 * mean, rel=1e-6)
    assert model.y.item() == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(("reported", "clients"), [("cloud", None), ("all", 3), ("selected", 1)])
def test_feddyn_reports_the_model_asked_for(run, reported, clients):
    """In the first round only one of three clients moves: their mean counts the two that still hold w = 1."""
    model = Curved(start=1.0)
    state, trainer = run(
        [FedDyn(0.5, reported=reported)],
        model=model,
        data=curved_data(A, B),
        local_steps=1,
        max_rounds=1,
        cohort_size=1,
    )
    (k,) = trainer.server.cohort
    step = -0.1 * A[k] * (1.0 - B[k])
    assert state["y"].item() == pytest.approx(1 + step + step / 3, rel=1e-5)
    assert model.y.item() == pytest.approx(state["y"].item() if clients is None else 1 + step / clients, rel=1e-5)


def test_scaffold_first_round_is_fedavg(run):
    model = partial(ImageClassifier, MLP(64, [16]), optimizer=partial(SGD, lr=0.1))
    start = model()
    plain, _ = run(model=copy.deepcopy(start), max_rounds=1, weighting="uniform")
    assert_same_bits(run([SCAFFOLD()], model=copy.deepcopy(start), max_rounds=1)[0], plain)
    two = [run(m, model=copy.deepcopy(start), max_rounds=2, weighting="uniform")[0] for m in ([], [SCAFFOLD()])]
    assert differs(*two)


def test_scaffold_divides_c_by_all_clients_not_by_the_cohort(run):
    method = SCAFFOLD()
    _, trainer = settle(run, [method], max_rounds=1, cohort_size=1, local_steps=1, start=1.0)
    (k,) = trainer.server.cohort
    gradient = A[k] * (1.0 - B[k])
    assert method.global_variate["y"].item() == pytest.approx(gradient / 3, rel=1e-5)
    assert trainer.client.memories()[k]["scaffold"]["variate"]["y"].item() == pytest.approx(gradient, rel=1e-5)


def test_scaffold_variates_are_mean_gradients_however_they_are_found(run):
    """Also with a learning rate that changes within the visit."""

    def halving(optimizer):
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    found = []
    for variate in ("displacement", "gradients"):
        model = Curved(lr=0.2)
        model.configure_optimizers = lambda model=model: halving(torch.optim.SGD(model.parameters(), lr=0.2))
        method = SCAFFOLD(variate=variate)
        state, _ = run([method], model=model, data=curved_data(A, B), local_epochs=3, max_rounds=1)
        found.append((state["y"].item(), method.global_variate["y"].item()))
    # the displacement weighs gradients by their rates, the sum of gradients does not
    rates, y = np.array([0.2, 0.1, 0.05]), np.zeros(3)
    gradients = []
    for rate in rates:
        gradients.append(np.array(A) * (y - B))
        y = y - rate * gradients[-1]
    assert found[0] == pytest.approx((y.mean(), (rates @ gradients / rates.sum()).mean()), rel=1e-5)
    assert found[1] == pytest.approx((y.mean(), np.mean(gradients)), rel=1e-5)


def test_scaffold_variates_are_mean_gradients_in_later_rounds_too(run):
    """The displacement holds the correction c - c_k, which is to be taken off again."""
    found = []
    for variate in ("displacement", "gradients"):
        method = SCAFFOLD(variate=variate)
        _, trainer = settle(run, [method], local_steps=3, max_rounds=3)
        own = [trainer.client.memories()[k]["scaffold"]["variate"]["y"].item() for k in range(3)]
        found.append([method.global_variate["y"].item(), *own])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][0] == pytest.approx(np.mean(found[0][1:]), rel=1e-4)


def test_scaffold_after_the_step_is_the_same_for_plain_sgd_and_passes_by_momentum(run):
    assert settle(run, [SCAFFOLD(correction="post_step")], local_steps=5, max_rounds=6)[0] == pytest.approx(
        settle(run, [SCAFFOLD()], local_steps=5, max_rounds=6)[0], rel=1e-5
    )
    method, rho, lr = SCAFFOLD(correction="post_step"), 0.5, 0.1
    model = Curved(lr=lr, momentum=rho)
    state, _ = run([method], model=model, data=curved_data(A, B), local_steps=2, max_rounds=2)
    a, b, x = np.array(A), np.array(B), 0.0
    c = np.zeros(3)
    for _ in range(2):
        y, buffer = np.full(3, x), np.zeros(3)
        for _ in range(2):
            buffer = rho * buffer + a * (y - b)
            y = y - lr * buffer - lr * (c.mean() - c)
        c = c - c.mean() + (x - y) / (2 * lr)
        x = y.mean()
    assert state["y"].item() == pytest.approx(x, rel=1e-5)


def test_fednova_is_fedavg_for_equal_steps(run):
    start = ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1, momentum=0.9))
    plain, _ = run(model=copy.deepcopy(start), local_steps=3)
    nova, _ = run([FedNova()], model=copy.deepcopy(start), local_steps=3)
    for name in plain:
        torch.testing.assert_close(nova[name], plain[name], rtol=1e-6, atol=1e-8)


def test_fednova_removes_the_inconsistency_of_unequal_steps(run):
    """tau_k = n_k: FedAvg weighs client k by n_k tau_k, FedNova by n_k alone."""
    a, sizes, lr = [0.05, 0.2, 0.1], [1, 12, 4], 0.05
    options = {"a": a, "sizes": sizes, "batch_size": 1, "lr": lr, "max_rounds": 500}
    share = np.array(sizes) * pull(a, lr, sizes)
    optimum = weighted(B, [n * ak for n, ak in zip(sizes, a, strict=True)])
    assert settle(run, [], **options)[0] == pytest.approx(weighted(B, share), abs=1e-3)
    found, _ = settle(run, [FedNova()], **options)
    assert found == pytest.approx(weighted(B, share / sizes), abs=1e-3)
    assert abs(found - optimum) < 0.1 * abs(weighted(B, share) - optimum)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_counts_a_step_by_its_weight_under_momentum(run, rho):
    norms = []

    class Spy(FedNova):
        def on_client_end(self, client):
            norms.append((self._norm, client.num_steps))
            return super().on_client_end(client)

    data = curved_data(A, B, sizes=[2, 5, 1], batch_size=1)
    run([Spy()], model=Curved(momentum=rho), data=data, max_rounds=1)
    for norm, tau in norms:
        assert norm == pytest.approx((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))
    assert [tau for _, tau in norms] == [2, 5, 1]


def test_fednova_beside_fedprox_in_closed_form(run):
    """a_k = sum (1 - lr mu)^j, and tau_eff counts plain steps."""
    mu, lr, sizes = 2.0, 0.1, [2, 5, 1]
    state, _ = run(
        [FedProx(mu), FedNova()], model=Curved(lr=lr), data=curved_data(A, B, sizes, batch_size=1), max_rounds=1
    )
    p = np.array(sizes) / 8
    change = pull(A, lr, sizes, mu) * np.array(B)
    norms = np.array([sum((1 - lr * mu) ** j for j in range(tau)) for tau in sizes])
    assert state["y"].item() == pytest.approx((p @ sizes) * (p @ (change / norms)), rel=1e-5)


# ---------------------------------------------------------------- clients without a step, and buffers
@pytest.mark.parametrize("method", [SCAFFOLD(), SCAFFOLD(variate="gradients"), FedNova(), FedDyn(), FedProto()])
def test_a_client_without_a_step_divides_by_nothing_and_moves_nothing(run, method):
    data = small_data(batch_size=102, drop_last=True)
    model = ImageClassifier(MLP(64, [32, 24]), Projector(16), optimizer=partial(SGD, lr=0.1))
    state, trainer = run([method], model=model, data=data)
    idle = [k for k in range(4) if data.info(k).num_examples < 102]
    assert 0 < len(idle) < 4
    assert all(torch.isfinite(value).all() for value in state.values())
    memories = trainer.client.memories()
    for k in idle:
        assert not any(v.any() for v in memories.get(k, {}).get("scaffold", {}).get("variate", {}).values())
        assert not any(v.any() for v in memories.get(k, {}).get("feddyn", {}).get("g", {}).values())
    if isinstance(method, SCAFFOLD):
        busy = [memories[k]["scaffold"]["variate"] for k in range(4) if k not in idle]
        for name, c in method.global_variate.items():
            torch.testing.assert_close(c, sum(own[name].double() for own in busy) / 4)


@pytest.mark.parametrize("method", [SCAFFOLD(), FedDyn()])
def test_buffers_enter_no_variate_no_h_and_no_momentum(run, method):
    model = ImageClassifier(MLP(64, [32, 24]), Projector(16), optimizer=partial(SGD, lr=0.1))
    names = {name for name, _ in model.named_parameters()}
    _, trainer = run([method], model=model, server_optimizer=partial(SGD, lr=1.0, momentum=0.9))
    kept = method.global_variate if isinstance(method, SCAFFOLD) else method.mean_g
    assert set(kept) == set(trainer.server.parameters) == names
    for memory in trainer.client.memories().values():
        assert set(memory[method.name].get("variate", memory[method.name].get("g"))) == names
    assert len(trainer.server.optimizer.state) == len(names)


# ---------------------------------------------------------------- what a penalty is made of
def moon_term(client, step, method):
    near, far = (client.observe(name)["representation"] for name in ("global", "previous"))
    return 2.0 * model_contrastive_loss(step.taps["representation"], near, [far], 0.7)


def fedcka_term(client, step, method):
    near, far = client.observe("global"), client.observe("previous")
    pairs = [[linear_cka(step.taps[tap], other[tap]) for other in (near, far)] for tap in ("early.0", "early.1")]
    return 3.0 * torch.stack([representation_contrast(*pair) for pair in pairs]).mean()


def fedproto_term(client, step, method):
    return 4.0 * prototype_distance(step.taps["representation"], step.targets, method.prototypes, method.known)


TERMS = {
    "decov": (DeCov(0.2), lambda c, step, m: 0.2 * covariance_decorrelation(step.taps["representation"])),
    "structureddecov": (
        StructuredDeCov(0.2, groups=4, gamma=0.5),
        lambda c, step, m: 0.2 * structured_covariance_decorrelation(step.taps["representation"], 4, 0.5),
    ),
    "feddecorr": (
        FedDecorr(0.3, form="paper"),
        lambda c, step, m: 0.3 * correlation_frobenius(step.taps["representation"], "paper"),
    ),
    "moon": (MOON(mu=2.0, temperature=0.7), moon_term),
    "fedcka": (FedCKA(mu=3.0), fedcka_term),
    "fedproto": (FedProto(lambda_=4.0), fedproto_term),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_penalty_is_its_coefficient_times_the_papers_term_of_the_right_tensors(run, name, monkeypatch):
    method, term = TERMS[name]
    penalty, checked = method.penalty, []

    def compared(client, step):
        found = penalty(client, step)
        if found is not None:
            torch.testing.assert_close(found, term(client, step, method), rtol=1e-4, atol=1e-20)
            checked.append(client.info.id)
        return found

    monkeypatch.setattr(method, "penalty", compared)
    run([method], "cnn", max_rounds=3)
    assert set(checked) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", [MOON, FedCKA])
def test_the_references_are_the_received_model_and_the_clients_own_last(run, kind):
    seen = []

    class Watch(Method):
        def penalty(self, client, step):
            for name, twin in ((n, t[0]) for n, t in client.references._twins.items()):
                own = client.memory(method).get("previous") or client.memory(method)["pool"][-1]
                assert_same_bits(dict(twin.state_dict()), client.received if name == "global" else own)
                seen.append(name)

    method = kind()
    run([method, Watch()], "cnn", max_rounds=2)
    assert set(seen) == {"global", "previous"}


def test_fedproto_keeps_the_prototypes_of_classes_that_nobody_held_this_round():
    method = FedProto()
    method.reset(None)
    for held, value in ((0, 2.0), (1, 5.0)):
        counts = torch.zeros(3, 1)
        counts[held] = 1
        method.on_round_end(None, {"prototypes": Weighted.of(torch.full((3, 2), value), counts)})
    assert method.prototypes.tolist() == [[2.0, 2.0], [5.0, 5.0], [0.0, 0.0]]
    assert method.known.tolist() == [True, True, False]


# ---------------------------------------------------------------- heads
DECAYING = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("method", [FedBABU(), Freeze()])
@pytest.mark.parametrize("server", [None, partial(torch.optim.Adam, lr=0.1)])
def test_a_frozen_head_keeps_every_bit_on_clients_and_server_and_the_body_learns(run, method, server):
    model = ImageClassifier(MLP(64, [16]), optimizer=DECAYING)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    local = []

    class Watch(Callback):
        def on_client_end(self, trainer, client):
            local.append(client.state())

    state, _ = run([method], model=model, server_optimizer=server, callbacks=[Watch()])
    for found in (*local, state):
        assert torch.equal(found["classifier.weight"], before["classifier.weight"])
        assert torch.equal(found["classifier.bias"], before["classifier.bias"])
        assert not torch.equal(found["encoder.layers.1.0.weight"], before["encoder.layers.1.0.weight"])


def test_a_head_that_is_reset_moves_on_the_client_and_not_on_the_server(run):
    model = ImageClassifier(MLP(64, [16]), optimizer=DECAYING)
    before = model.classifier.weight.detach().clone()
    local = []

    class Watch(Callback):
        def on_client_end(self, trainer, client):
            local.append((client.received["classifier.weight"].clone(), client.state()["classifier.weight"]))

    state, _ = run([Freeze("reset_each_round")], model=model, callbacks=[Watch()])
    assert torch.equal(state["classifier.weight"], before)
    for received, trained in local:
        assert torch.equal(received, before) and not torch.equal(trained, before)


def test_an_orthogonal_head_has_orthonormal_rows_and_one_seed_draws_one(run):
    heads = [run([Freeze(orthogonal=True)])[0]["classifier.weight"] for _ in range(2)]
    torch.testing.assert_close(heads[0] @ heads[0].T, torch.eye(10), atol=1e-5, rtol=0)
    assert torch.equal(*heads)


# ---------------------------------------------------------------- MOON
def test_moon_is_absent_in_the_first_visit_and_there_in_the_second(run):
    _, trainer = run([MOON()], max_rounds=2)
    assert ["train/moon" in row for row in trainer.history] == [False, True]
    _, trainer = run([MOON(first="global", mu=2.0)], max_rounds=1)
    assert trainer.metrics["train/moon"] == pytest.approx(2 * np.log(2), rel=1e-5)
    plain = run(max_rounds=1)[0]
    for name, value in run([MOON(first="global")], max_rounds=1)[0].items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)


def test_moon_contrasts_with_the_clients_own_last_models_newest_first(run):
    seen = {}

    class Spy(MOON):
        name = "moon"

        def penalty(self, client, step):
            own = seen.get(client.info.id, [])
            assert len(self._names) == min(len(own), 2)
            for reference, state in zip(self._names, reversed(own), strict=False):
                twin = client.references._twins[reference][0]
                assert_same_bits(dict(twin.state_dict()), state)
                assert differs(dict(twin.state_dict()), client.received)
            return super().penalty(client, step)

        def on_client_end(self, client):
            seen.setdefault(client.info.id, []).append(client.state())
            return super().on_client_end(client)

    run([Spy(pool_size=2)], max_rounds=5, participation=0.5)
    assert max(map(len, seen.values())) >= 3


def test_moon_random_first_model_is_each_clients_own_and_draws_nothing_of_the_clients_stream(run):
    drawn = {}

    class Spy(MOON):
        name = "moon"

        def penalty(self, client, step):
            drawn[client.info.id] = client.references._twins["previous"][0].classifier.weight.clone()
            return super().penalty(client, step)

    assert_same_bits(run([Spy(mu=0, first="random")], max_rounds=1)[0], run(max_rounds=1)[0])
    assert not torch.equal(drawn[0], drawn[1])
    again = dict(drawn)
    run([Spy(first="random")], max_rounds=1)
    assert_same_bits(drawn, again)


def test_methods_share_a_reference_which_runs_once_a_batch_as_far_as_the_last_tap_of_any(run):
    runs = []

    class Watch(Method):
        def on_client_start(self, client):
            inner = client.references._run
            if inner.__name__ == "_run":

                def counted(name, batch):
                    found = inner(name, batch)
                    runs.append((client.info.id, client.num_steps, name, tuple(found)))
                    return found

                client.references._run = counted

    run([Watch(), MOON(), FedCKA()], "cnn", max_rounds=2)
    taps = ("early.0", "early.1", "representation")
    assert {(name, seen) for _, _, name, seen in runs} == {("global", taps), ("previous", taps)}
    assert len({found[:3] for found in runs}) == len(runs) > 0


# ---------------------------------------------------------------- cached references
@pytest.mark.parametrize("method", [FedCKA(), MOON(pool_size=2)], ids=["fedcka", "moon"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "channels_last": True}], ids=["fp32", "bf16"])
def test_cached_references_are_the_same_bits_for_fewer_runs(run, method, options):
    runs = []

    class Count(type(method)):
        name = type(method).__name__.lower()

        def on_client_start(self, client):
            inner = client.references._run
            if inner.__name__ == "_run":

                def counted(*args):
                    runs[-1] += 1
                    return inner(*args)

                client.references._run = counted
            super().on_client_start(client)

    states = []
    for cached in (False, True):
        runs.append(0)
        counting = Count(**{key: getattr(method, key) for key in ("mu",)})
        # a last batch of a few rows is rounded otherwise than the same rows in a whole one
        data = small_data("cnn", batch_size=16)
        how = {"local_epochs": 4, "max_rounds": 3, "cache_references": cached, **options}
        states.append(run([counting], "cnn", data=data, **how)[0])
    assert_same_bits(*states)
    # a last batch is run in each epoch, and once more for the cache; whole ones once
    assert runs[1] < 0.75 * runs[0]


# ---------------------------------------------------------------- FedRS, FedProto, FedBN, Local
def test_fedrs_touches_the_logits_of_missing_classes_only():
    logits, counts = torch.randn(5, 4), torch.tensor([3, 0, 1, 0])
    found = restricted_logits(logits, counts, alpha=0.3)
    assert torch.equal(found[:, [0, 2]], logits[:, [0, 2]])
    torch.testing.assert_close(found[:, [1, 3]], 0.3 * logits[:, [1, 3]])


def test_fedrs_without_bias_is_scaled_products_of_features_and_weights(run):
    seen = []

    class Spy(FedRS):
        name = "fedrs"

        def transform_logits(self, client, logits):
            found = super().transform_logits(client, logits)
            head = client.module.classifier
            present = client.info.label_counts > 0
            seen.append(torch.allclose(found[:, present], (logits - head.bias)[:, present]))
            return found

    run([Spy(use_bias=False)], max_rounds=1)
    assert seen and all(seen)


def test_fedproto_prototypes_are_the_plain_means_over_owners_of_class_means(run):
    """With learning rate 0 nothing moves while they are taken."""
    model = ImageClassifier(MLP(64, [12]), optimizer=partial(SGD, lr=0.0))
    encoder, data, method = copy.deepcopy(model.encoder), small_data(), FedProto()
    run([method], model=model, data=data, max_rounds=1, local_epochs=2)
    means: dict[int, list] = {}
    for k in range(4):
        x, y = (torch.cat(parts) for parts in zip(*data.train_dataloader(k), strict=True))
        z = encoder(x).detach().double()
        for c in y.unique().tolist():
            means.setdefault(c, []).append(z[y == c].mean(0))
    assert max(map(len, means.values())) > 1
    for c, found in means.items():
        torch.testing.assert_close(method.prototypes[c], torch.stack(found).mean(0), rtol=1e-5, atol=1e-6)
    assert method.known.tolist() == [c in means for c in range(10)]


def test_fedproto_takes_prototypes_from_the_last_local_epoch_alone(run):
    sums = {}

    class Spy(FedProto):
        name = "fedproto"

        def on_client_end(self, client):
            sums[client.info.id] = float(self._sums[1].sum())
            return super().on_client_end(client)

    data = small_data()
    run([Spy()], data=data, local_epochs=3, max_rounds=1)
    assert sums == {k: data.info(k).num_examples for k in range(4)}


def test_fedproto_draws_representations_to_the_prototypes_from_the_second_round_on(run):
    _, trainer = run([FedProto(lambda_=5.0)], max_rounds=6, model=ImageClassifier(MLP(64, [12])))
    terms = [row.get("train/fedproto") for row in trainer.history]
    assert terms[0] is None
    _, loose = run([FedProto(lambda_=1e-6)], max_rounds=6, model=ImageClassifier(MLP(64, [12])))
    assert terms[-1] / 5.0 < loose.history[-1]["train/fedproto"] / 1e-6


def test_local_models_never_hear_of_each_other_and_metrics_are_their_mean(run, capsys):
    data = small_data()
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1))
    start = copy.deepcopy(model)
    state, trainer = run([Local()], model=model, data=data, max_rounds=2)
    assert_same_bits(state, dict(start.state_dict()))
    assert trainer.metrics["bytes/up"] == 0
    assert "all entries of the state stay with each client" in capsys.readouterr().err
    hits = []
    for k in range(4):
        own = copy.deepcopy(start)
        optimizer = SGD(own.parameters(), lr=0.1)
        for round_ in range(2):
            loader = data.train_dataloader(k)
            loader.generator.manual_seed(address(trainer.seed, "batches", round_, k))
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(own(x), y).backward()
                optimizer.step()
        assert_same_bits(trainer.client.own_entries(k), dict(own.state_dict()))
        x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
        hits.append((own(x).argmax(1) == y).float().mean().item())
    assert trainer.metrics["test/accuracy"] == pytest.approx(np.mean(hits), abs=1e-6)


def test_fedbn_keeps_normalisation_with_the_client_and_averages_the_rest(run):
    state, trainer = run([FedBN()])
    own = [trainer.client.own_entries(k) for k in range(4)]
    layers = ("projector.layers.1", "projector.layers.4")
    assert all(name.startswith(layers) for name in own[0]) and len(own[0]) == 10
    assert differs(own[0], own[1])
    start = small_model().state_dict()
    assert_same_bits({n: state[n] for n in own[0]}, {n: start[n] for n in own[0]})
    assert differs({"w": state["classifier.weight"]}, {"w": start["classifier.weight"]})


def test_fedprox_draws_entries_that_do_not_travel_to_the_clients_own(run):
    """Else a normalisation layer would be drawn to the weights of round 0."""
    gaps = []

    class Watch(Method):
        def on_client_start(self, client):
            gaps.append(max(float(v.abs().max()) for v in client.drift_so_far(client.trainable).values()))

    run([FedBN(), FedProx(1.0), Watch()], max_rounds=3)
    assert gaps == [0.0] * 12


# ---------------------------------------------------------------- server optimizers
def recurrence(kind, deltas, lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3, v=0.0, correct="none", dampening=0.0):
    """The published recurrences, in float64 NumPy."""
    w, m, v = np.zeros(deltas.shape[1]), np.zeros(deltas.shape[1]), np.full(deltas.shape[1], v)
    for t, delta in enumerate(deltas, 1):
        if kind is FedAvgM:
            m = beta1 * m + (1 - dampening) * delta
            w = w + lr * m
            continue
        m, square = beta1 * m + (1 - beta1) * delta, delta**2
        if kind is FedAdagrad:
            v = v + square
        elif kind is FedAdam:
            v = beta2 * v + (1 - beta2) * square
        else:
            v = v - (1 - beta2) * square * np.sign(v - square)
        power = t + (correct == "flower")
        factor = 1 if correct == "none" else np.sqrt(1 - beta2**power) / (1 - beta1**power)
        w = w + lr * factor * m / (np.sqrt(v) + tau)
    return w


@pytest.mark.parametrize(
    ("kind", "options", "terms"),
    [
        (FedAvgM, {"momentum": 0.9}, {}),
        (FedAvgM, {"momentum": 0.9, "dampening": 0.9}, {"dampening": 0.9}),
        (FedAdagrad, {}, {"beta1": 0.0}),
        (FedAdagrad, {"beta1": 0.9, "initial_v": 1e-6}, {"v": 1e-6}),
        (FedAdam, {}, {}),
        (FedAdam, {"bias_correction": "adam"}, {"correct": "adam"}),
        (FedAdam, {"bias_correction": "flower", "tau": 1e-9}, {"correct": "flower", "tau": 1e-9}),
        (FedYogi, {}, {}),
        (FedYogi, {"initial_v": 1e-6, "bias_correction": "adam"}, {"v": 1e-6, "correct": "adam"}),
    ],
)
def test_server_optimizers_follow_their_recurrences(kind, options, terms):
    deltas = np.random.default_rng(0).normal(scale=0.1, size=(12, 5))
    server = Server({"w": torch.zeros(5, dtype=torch.float64)}, ["w"], partial(kind, lr=0.1, **options))
    server._round = lambda name: server.state[name].copy_(server.parameters[name].detach())
    for delta in deltas:
        server.step({"w": torch.from_numpy(delta)}, {})
    np.testing.assert_allclose(server.state["w"].numpy(), recurrence(kind, deltas, **terms), rtol=1e-10)


def test_fedavgm_dampened_is_hsus_form_with_a_smaller_rate_and_torchs_dampening_is_not():
    deltas = torch.randn(6, 3).double()

    def follow(build):
        server = Server({"w": torch.zeros(3)}, ["w"], build)
        for delta in deltas:
            server.step({"w": delta}, {})
        return server.state["w"]

    dampened = follow(partial(FedAvgM, lr=1.0, momentum=0.9, dampening=0.9))
    torch.testing.assert_close(dampened, follow(partial(SGD, lr=0.1, momentum=0.9)))
    assert not torch.allclose(dampened, follow(partial(SGD, lr=1.0, momentum=0.9, dampening=0.9)))


def test_fedavgm_without_momentum_is_fedavg(run):
    assert_same_bits(run(server_optimizer=partial(FedAvgM, momentum=0.0))[0], run()[0])
