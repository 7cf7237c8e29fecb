"""SCAFFOLD and FedDyn correct the drift of clients by what each remembers."""

import copy
from functools import partial

import make_reference_values as reference
import pytest
import torch
from helpers.quadratics import UNEQUAL, A, B, Curved, curved_data, settle, weighted
from helpers.runs import assert_same_bits, differs, plain_sgd_model, small_data
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.data import IID
from fl_lightning.methods import SCAFFOLD, FedDyn
from fl_lightning.models import MLP, ImageClassifier

SIZES = [2, 1, 6]
VALUES = reference.load("scaffold")


def falling(model):
    """A learning rate of 0.2, and half as large after each step of the visit."""
    optimizer = SGD(model.parameters(), lr=0.2)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def settings(name):
    if name.startswith("falling rate"):
        model = Curved()
        model.configure_optimizers = partial(falling, model)
        variate = "gradients" if "gradients" in name else "displacement"
        return SCAFFOLD(variate), model, {"max_rounds": 1, "local_epochs": 3}
    method, momentum, rounds = {
        "plain": (SCAFFOLD(), 0.0, 3),
        "by gradients": (SCAFFOLD("gradients"), 0.0, 3),
        "scaled": (SCAFFOLD(scaled=True), 0.0, 3),
        "after momentum": (SCAFFOLD(correction="post_step"), 0.5, 2),
    }[name]
    return method, Curved(momentum=momentum), {"max_rounds": rounds, "local_steps": 2}


@pytest.mark.parametrize("name", VALUES)
def test_scaffold_follows_its_published_recurrence(run, name):
    """The state, the server's variate and all clients': however the variates are found, and after momentum, too."""
    method, model, given = settings(name)
    data = curved_data(A, B, sizes=SIZES if name == "scaled" else None)
    state, trainer = run([method], model=model, data=data, **given)
    own = [trainer.client.memories()[k]["scaffold"]["variate"]["y"].item() for k in range(3)]
    found = [state["y"].item(), method.global_variate["y"].item(), *own]
    assert found == pytest.approx(VALUES[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "weights", "given"),
    [
        (SCAFFOLD(scaled=True), SIZES, {"local_steps": 5, "max_rounds": 30}),
        (SCAFFOLD("gradients"), [1, 1, 1], {"local_steps": 5, "max_rounds": 30}),
        (FedDyn(1.0, scaled=True), SIZES, {"local_steps": 8, "max_rounds": 15}),
        (FedDyn(1.0, scaled=False), [1, 1, 1], {"local_steps": 8, "max_rounds": 15}),
    ],
    ids=["scaffold, scaled", "scaffold", "feddyn, scaled", "feddyn"],
)
def test_clients_weigh_by_examples_when_scaled_and_alike_when_not(run, method, weights, given):
    found, _ = settle(run, [method], sizes=SIZES, lr=0.2, **given)
    assert found == pytest.approx(weighted(B, [a * w for a, w in zip(A, weights, strict=True)]), abs=1e-3)


def test_scaffold_first_round_is_fedavg(run):
    model = partial(ImageClassifier, MLP(64, [16]), optimizer=partial(SGD, lr=0.1))
    start = model()
    plain, _ = run(model=copy.deepcopy(start), max_rounds=1, weighting="uniform")
    assert_same_bits(run([SCAFFOLD()], model=copy.deepcopy(start), max_rounds=1)[0], plain)
    two = [run(m, model=copy.deepcopy(start), weighting="uniform")[0] for m in ([], [SCAFFOLD()])]
    assert differs(*two)


def test_scaffold_divides_c_by_all_clients_not_by_the_cohort(run):
    method = SCAFFOLD()
    _, trainer = settle(run, [method], max_rounds=1, cohort_size=1, local_steps=1, start=1.0)
    (k,) = trainer.server.cohort
    gradient = A[k] * (1.0 - B[k])
    assert method.global_variate["y"].item() == pytest.approx(gradient / 3, rel=1e-5)
    assert trainer.client.memories()[k]["scaffold"]["variate"]["y"].item() == pytest.approx(gradient, rel=1e-5)


def test_scaled_scaffold_is_the_papers_for_clients_of_one_size(run):
    even = small_data(partitioner=IID(), train_size=120, test_size=50)
    states = [run([SCAFFOLD(scaled=scaled)], data=even, model=plain_sgd_model())[0] for scaled in (True, False)]
    assert_same_bits(*states)


@pytest.mark.parametrize("given", [{"local_steps": 3, "gradient_clip_val": 1.0}, UNEQUAL], ids=["clipped", "unequal"])
def test_scaffolds_gradients_are_what_the_optimizer_gets_less_the_correction(run, given):
    """So that they are the displacement, whatever is clipped, and in later rounds too."""
    found = []
    for variate in ("displacement", "gradients"):
        method = SCAFFOLD(variate=variate)
        _, trainer = settle(run, [method], max_rounds=3, **given)
        own = [trainer.client.memories()[k]["scaffold"]["variate"]["y"].item() for k in range(3)]
        found.append([method.global_variate["y"].item(), *own])
        assert found[-1][0] == pytest.approx(sum(own) / 3, rel=1e-5)
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    # in the first round, where nothing is corrected, no gradient is larger than the clip
    settle(run, [method], max_rounds=1, **given)
    assert "gradient_clip_val" not in given or abs(method.global_variate["y"].item()) <= 1


def test_scaffolds_gradients_without_clipping_are_the_uncorrected_ones_to_the_bit(run):
    """A clip that is too large to act changes no bit either."""
    sums, visits = {}, []

    class Watch(Method):
        def on_client_start(self, client):
            sums.clear()

        def on_before_optimizer_step(self, client, optimizer):
            for name in client.sent:
                gradient = client.live[name].grad
                sums[name] = gradient.clone() if name not in sums else sums[name] + gradient

    class Late(SCAFFOLD):
        def on_client_end(self, client):
            sent = super().on_client_end(client)
            assert_same_bits(client.memory(self)["variate"], {n: t / client.num_steps for n, t in sums.items()})
            visits.append(client.info.id)
            return sent

    methods = [Watch(), Late(variate="gradients")]
    states = [run(methods, model=plain_sgd_model(), gradient_clip_val=clip)[0] for clip in (None, 1e6)]
    assert len(visits) == 2 * 2 * 4
    assert_same_bits(*states)


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
    model, method = Curved(start=1.0), FedDyn(0.5, reported=reported)
    given = {"local_steps": 1, "max_rounds": 1, "cohort_size": 1}
    state, trainer = run([method], model=model, data=curved_data(A, B), **given)
    (k,) = trainer.server.cohort
    step = -0.1 * A[k] * (1.0 - B[k])
    assert state["y"].item() == pytest.approx(1 + step + step / 3, rel=1e-5)
    assert model.y.item() == pytest.approx(state["y"].item() if clients is None else 1 + step / clients, rel=1e-5)
