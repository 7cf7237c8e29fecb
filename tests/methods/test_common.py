"""Laws of several methods or of every one; each fails for a wrong sign or a missing factor."""

import math
import threading
from functools import partial

import pytest
import torch
from helpers.errors import refused, warned
from helpers.quadratics import UNEQUAL, A, B, settle, weighted
from helpers.runs import assert_same_bits, differs, small_data
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.client.reference_models import reference_copy
from fl_lightning.data import IID
from fl_lightning.functional import (
    correlation_frobenius,
    covariance_decorrelation,
    linear_cka,
    model_contrastive_loss,
    not_true_distillation,
    prototype_distance,
    representation_contrast,
    singular_value_variance,
    structured_covariance_decorrelation,
)
from fl_lightning.methods import (
    MOON,
    SCAFFOLD,
    DeCov,
    FedALA,
    FedASAM,
    FedCKA,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedExP,
    FedLC,
    FedNova,
    FedNTD,
    FedPer,
    FedProto,
    FedProx,
    FedRS,
    FedSAM,
    FedUV,
    FedVLS,
    FixBN,
    LGFedAvg,
    LogitAdjustment,
    PerFedAvg,
    StructuredDeCov,
)
from fl_lightning.models import MLP, ImageClassifier, Projector
from fl_lightning.utilities.errors import ClientError


def plain_sgd():
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [32, 24]), Projector(16), optimizer=partial(SGD, lr=0.1))


NEUTRAL = {
    "moon": (MOON(mu=0), MOON(mu=5.0)),
    "fedntd": (FedNTD(beta=0), FedNTD(beta=5.0)),
    "fedrs": (FedRS(alpha=1), FedRS(alpha=0.2)),
    "feddisco": (FedDisco(a=0, b=0), FedDisco()),
    "fedexp": (FedExP(eps=math.inf), FedExP(eps=0)),
    "fedproto": (FedProto(0, aggregate_weights=True), FedProto(1.0, aggregate_weights=True)),
    "decov": (DeCov(weight=0), DeCov(weight=1.0)),
    "structureddecov": (StructuredDeCov(weight=0), StructuredDeCov(weight=1.0, groups=4)),
    "fedprox": (FedProx(mu=0), FedProx(mu=1.0)),
    "fedlc": (FedLC(tau=0), FedLC(tau=1.0)),
    "fedlc by log prior": (FedLC(tau=0, margin="log_prior"), FedLC(margin="log_prior")),
    "logit adjustment": (LogitAdjustment(tau=0), LogitAdjustment()),
    "logit adjustment by the global prior": (LogitAdjustment(0, "global"), LogitAdjustment(1, "global")),
    "fedcka": (FedCKA(mu=0), FedCKA(mu=3.0)),
    "feduv": (FedUV(mu=0, lambda_=0), FedUV()),
    "feddecorr": (FedDecorr(beta=0), FedDecorr()),
    "fedsam": (FedSAM(rho=0), FedSAM()),
    "fedasam": (FedASAM(rho=0), FedASAM()),
    "perfedavg": (PerFedAvg(0), PerFedAvg(0.1)),
    "fedala": (FedALA(rate=0), FedALA(rate=50.0)),
    "fedala without layers": (FedALA(layers=0), FedALA(rate=50.0)),
    "fedper": (FedPer(0), FedPer()),
    "lgfedavg": (LGFedAvg(5), LGFedAvg()),  # of five layers
    "fixbn": (FixBN(share=1), FixBN(share=0.5)),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_neutral_coefficient_is_fedavg_bit_for_bit_and_another_is_not(run, fedavg, name):
    neutral, strong = NEUTRAL[name]
    kind = "cnn" if name == "fedcka" else "mlp"
    assert_same_bits(run([neutral], kind)[0], fedavg[kind])
    assert differs(run([strong], kind)[0], fedavg[kind])


def test_the_order_of_penalties_and_gradient_corrections_does_not_matter(run):
    for pair in ((FedUV(), FedDecorr(0.1)), (FedProx(0.1), FedDecorr(0.1))):
        first, second = (run(list(order))[0] for order in (pair, pair[::-1]))
        for name in first:
            torch.testing.assert_close(first[name], second[name], atol=2e-4, rtol=2e-3)
        assert differs(first, run([pair[0]])[0])
    assert_same_bits(first, second)  # of a correction and a penalty


@pytest.mark.parametrize("method", [FedUV(), FedDecorr(), FedLC(), FedCKA()], ids=lambda method: method.name)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_of_one_and_two_stay_finite(run, method, batch_size):
    kind = "cnn" if isinstance(method, FedCKA) else "mlp"
    model = None if kind == "cnn" else ImageClassifier(MLP(64, [32, 16]))
    data = small_data(kind, batch_size=batch_size, train_size=40, test_size=20)
    state, _ = run([method], kind, model=model, data=data)
    assert all(torch.isfinite(value).all() for value in state.values())


def test_partition_cohort_batches_and_initial_weights_do_not_depend_on_the_method(run):
    """Methods that are compared on one seed see the same of everything that is drawn."""
    orders = []

    class Watching(Method):
        def penalty(self, client, step):
            orders[-1].append(step.targets.tolist())

    class Drawing(Watching):
        def on_client_start(self, client):
            torch.rand(7)

        def penalty(self, client, step):
            torch.rand(3)
            super().penalty(client, step)

    for method in (Drawing(), Watching()):
        orders.append([])
        run([method], participation=0.5, max_rounds=3)
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("method", "given", "near"),
    [
        (SCAFFOLD(), {"cohort_size": 2}, 1e-4),
        (SCAFFOLD(), {**UNEQUAL, "lr": 0.1, "max_rounds": 30}, 1e-3),
        (SCAFFOLD(variate="gradients"), {}, 1e-4),
        (FedDyn(alpha=2.0), {}, 1e-4),
        (FedDyn(alpha=1.0, scaled=False), {**UNEQUAL, "lr": 0.1, "max_rounds": 40}, 5e-3),
    ],
    ids=["half of the clients a round", "unequal steps", "gradients", "feddyn", "feddyn, unequal steps"],
)
def test_scaffold_and_feddyn_settle_at_the_optimum(run, method, given, near):
    found, _ = settle(run, [method], **{"lr": 0.2, "local_steps": 5, "max_rounds": 25, **given})
    assert found == pytest.approx(weighted(B, A), abs=near)


@pytest.mark.parametrize(
    "method", [SCAFFOLD(), SCAFFOLD("gradients"), SCAFFOLD(scaled=True), FedNova(), FedDyn(), FedProto()]
)
def test_a_client_without_a_step_divides_by_nothing_and_moves_nothing(run, method):
    data = small_data(batch_size=30, drop_last=True, train_size=120, test_size=50)
    with warned("data"):
        state, trainer = run([method], model=plain_sgd(), data=data)
    idle = [k for k in range(4) if data.info(k).num_examples < 30]
    assert 0 < len(idle) < 4
    assert all(torch.isfinite(value).all() for value in state.values())
    memories = trainer.client.memories()
    for k in idle:
        assert not any(v.any() for v in memories.get(k, {}).get("scaffold", {}).get("variate", {}).values())
        assert not any(v.any() for v in memories.get(k, {}).get("feddyn", {}).get("g", {}).values())
    if isinstance(method, SCAFFOLD):
        busy = [memories[k]["scaffold"]["variate"] for k in range(4) if k not in idle]
        shares = [4 * data.info(k).num_examples / 120 if method.scaled else 1 for k in range(4) if k not in idle]
        for name, c in method.global_variate.items():
            torch.testing.assert_close(c, sum(s * own[name].double() for s, own in zip(shares, busy, strict=True)) / 4)


@pytest.mark.parametrize("method", [SCAFFOLD(), FedDyn()], ids=lambda method: method.name)
def test_buffers_enter_no_variate_no_h_and_no_momentum(run, method):
    model = plain_sgd()
    names = {name for name, _ in model.named_parameters()}
    _, trainer = run([method], model=model, server_optimizer=partial(SGD, lr=1.0, momentum=0.9), max_rounds=1)
    kept = method.global_variate if isinstance(method, SCAFFOLD) else method.mean_g
    assert set(kept) == set(trainer.server.optimized) == names
    for memory in trainer.client.memories().values():
        assert set(memory[method.name].get("variate", memory[method.name].get("g"))) == names
    assert len(trainer.server.optimizer.state) == len(names)


def moon_term(client, step, method):
    near, far = (client.observe(name)["representation"] for name in ("global", "previous"))
    return 2.0 * model_contrastive_loss(step.taps["representation"], near, [far], 0.7)


def fedcka_term(client, step, method):
    near, far = client.observe("global"), client.observe("previous")
    pairs = [[linear_cka(step.taps[tap], other[tap]) for other in (near, far)] for tap in ("early.0", "early.1")]
    return 3.0 * torch.stack([representation_contrast(*pair) for pair in pairs]).mean()


def fedproto_term(client, step, method):
    return 4.0 * prototype_distance(step.taps["representation"], step.targets, method.prototypes, method.known)


def fedntd_term(client, step, method):
    return 2.0 * not_true_distillation(step.taps["logits"], client.observe("global")["logits"], step.targets, 3.0)


TERMS = {
    "fedntd": (FedNTD(beta=2.0, temperature=3.0), fedntd_term),
    "decov": (DeCov(0.2), lambda c, step, m: 0.2 * covariance_decorrelation(step.taps["representation"])),
    "structureddecov": (
        StructuredDeCov(0.2, groups=4, gamma=0.5),
        lambda c, step, m: 0.2 * structured_covariance_decorrelation(step.taps["representation"], 4, 0.5),
    ),
    "feddecorr": (
        FedDecorr(0.3, form="paper"),
        lambda c, step, m: 0.3 * correlation_frobenius(step.taps["representation"], "paper"),
    ),
    "feddecorr by singular values": (
        FedDecorr(0.3, form="singular_values"),
        lambda c, step, m: 0.3 * singular_value_variance(step.taps["representation"]),
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
            total = found[0] if isinstance(found, tuple) else found
            torch.testing.assert_close(total, term(client, step, method), rtol=1e-4, atol=1e-20)
            checked.append(client.info.id)
        return found

    monkeypatch.setattr(method, "penalty", compared)
    run([method], "cnn")
    assert set(checked) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("method", "kind", "terms"),
    [
        (FedUV(spectral=0.3), "mlp", ["uniformity", "variance", "spectral"]),
        (FedUV(mu=0), "mlp", ["variance"]),
        (FedCKA(layers=3), "cnn", ["early.0", "early.1", "early.2"]),
        (FedVLS(), "mlp", ["suppression", "distillation"]),
    ],
    ids=["feduv", "feduv of one term", "fedcka", "fedvls"],
)
def test_the_logged_terms_of_a_method_add_up_to_its_logged_penalty(run, method, kind, terms):
    row = run([method], kind, local_epochs=2)[1].history[-1]
    tag = f"train/{method.name}"
    logged = {name: value for name, value in row.items() if name.startswith(f"{tag}/")}
    assert set(logged) == {f"{tag}/{term}" for term in terms}
    assert sum(logged.values()) == pytest.approx(row[tag], rel=1e-6)
    assert all(logged.values())


def test_the_term_that_became_nan_is_named_rather_than_the_whole_penalty(run, monkeypatch):
    monkeypatch.setattr("fl_lightning.methods.feduv.probability_variance_hinge", lambda logits, hinge: logits.sum() / 0)
    with refused("client 0", "round 0", "feduv/variance", "step 0", kind=ClientError):
        run([FedUV()], max_rounds=1)


# ---------------------------------------------------------------- references
@pytest.mark.parametrize("kind", [MOON, FedCKA])
def test_the_references_are_the_received_model_and_the_clients_own_last(run, kind):
    seen, method = [], kind()

    class Watch(Method):
        def penalty(self, client, step):
            for name, model in client.references.models.items():
                own = client.memory(method).get("previous") or client.memory(method)["pool"][-1]
                assert_same_bits(dict(model.state_dict()), client.received if name == "global" else own)
                seen.append(name)

    run([method, Watch()], "cnn")
    assert set(seen) == {"global", "previous"}


def counting(runs):
    """A method that notes each run of a reference: client, step, name of the model and the taps seen."""

    class Counts(Method):
        def on_client_start(self, client):
            inner = client.references._run
            if inner.__name__ == "_run":

                def counted(name, batch):
                    found = inner(name, batch)
                    runs.append((client.info.id, client.num_steps, name, tuple(found)))
                    return found

                client.references._run = counted

    return Counts()


def test_methods_share_a_reference_which_runs_once_a_batch_as_far_as_the_last_tap_of_any(run):
    runs = []
    run([counting(runs), MOON(), FedCKA()], "cnn")
    taps = ("early.0", "early.1", "representation")
    assert {(name, seen) for _, _, name, seen in runs} == {("global", taps), ("previous", taps)}
    assert len({found[:3] for found in runs}) == len(runs) > 0
    runs.clear()
    run([counting(runs), FedCKA()], "cnn")
    assert {seen for *_, seen in runs} == {taps[:2]}


@pytest.mark.parametrize(
    ("method", "options"),
    [(FedCKA(), {}), (MOON(pool_size=2), {"precision": "bf16-mixed", "channels_last": True})],
    ids=["fedcka fp32", "moon bf16"],
)
def test_cached_references_are_the_same_bits_for_fewer_runs(run, method, options):
    states, numbers = [], []
    for cached in (False, True):
        # a last batch of a few rows is rounded otherwise than the same rows in a whole one
        data = small_data("cnn", num_clients=2, partitioner=IID(), batch_size=8, train_size=44, test_size=20)
        runs, given = [], {"local_epochs": 3, "cache_references": cached, **options}
        states.append(run([counting(runs), method], "cnn", data=data, **given)[0])
        numbers.append(len(runs))
    assert_same_bits(*states)
    # a last batch is run in each epoch, and once more for the cache; whole ones once
    assert 0 < numbers[1] < 0.75 * numbers[0]


class Locked(ImageClassifier):
    """Has a lock, a random generator, a bound method and the old weight_norm, most of which cannot be copied."""

    def __init__(self, plain=False):
        super().__init__(MLP(64, [32, 16]))
        with pytest.warns(FutureWarning, match="weight_norm"):
            torch.nn.utils.weight_norm(self.classifier)
        if not plain:
            self.encoder.guard, self.generator, self.lines = threading.Lock(), torch.Generator(), (line for line in "")
            self.call = self.forward


@pytest.mark.parametrize("method", [MOON(), FedCKA()], ids=lambda method: method.name)
def test_a_model_with_parts_that_cannot_be_copied_trains_as_one_without(run, method):
    states = []
    for plain in (True, False):
        torch.manual_seed(0)
        states.append(run([method], model=Locked(plain), max_rounds=2)[0])
    assert_same_bits(*states)


def test_a_copy_of_a_model_has_its_own_generator_and_methods():
    model = Locked()
    copied = reference_copy(model, None)
    assert copied.encoder.guard is model.encoder.guard and copied.call.__self__ is copied
    torch.rand(1, generator=copied.generator)
    assert not torch.equal(copied.generator.get_state(), model.generator.get_state())
