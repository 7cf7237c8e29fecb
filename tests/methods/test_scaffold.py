"""SCAFFOLD's control variates are mean gradients, and they correct the drift of clients."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.quadratics import A, B, Curved, curved_data, settle, weighted
from helpers.runs import assert_finite, assert_same_bits, differs, plain_sgd_model, small_data
from torch.optim import SGD, Adam

from fl_lightning import Method
from fl_lightning.data import IID
from fl_lightning.methods import SCAFFOLD, FedProx
from fl_lightning.models import MLP, ImageClassifier


def test_scaffold_settles_at_the_optimum_with_half_of_the_clients_a_round(run):
    found, _ = settle(run, [SCAFFOLD()], local_steps=3, cohort_size=2)
    assert found == pytest.approx(weighted(B, A), abs=1e-3)


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


SIZES = [2, 1, 6]


@pytest.mark.parametrize("variate", ["displacement", "gradients"])
@pytest.mark.parametrize(("scaled", "weights"), [(True, SIZES), (False, [1, 1, 1])])
def test_scaffold_weighs_clients_by_examples_when_scaled_and_alike_when_not(run, scaled, weights, variate):
    found, _ = settle(run, [SCAFFOLD(variate, scaled=scaled)], sizes=SIZES, local_steps=3)
    assert found == pytest.approx(weighted(B, [a * w for a, w in zip(A, weights, strict=True)]), abs=1e-3)


def test_scaled_scaffold_is_the_papers_for_clients_of_one_size(run):
    states = [run([SCAFFOLD(scaled=scaled)], data=even(), model=plain_sgd_model())[0] for scaled in (True, False)]
    assert_same_bits(*states)
    uneven = [run([SCAFFOLD(scaled=scaled)], model=plain_sgd_model())[0] for scaled in (True, False)]
    assert differs(*uneven)


def even():
    return small_data(partitioner=IID())


def test_scaled_scaffold_follows_feddyns_recurrence(run):
    method, lr, steps = SCAFFOLD(scaled=True), 0.1, 2
    _, trainer = settle(run, [method], sizes=SIZES, local_steps=steps, max_rounds=3)
    a, b, omega = np.array(A), np.array(B), 3 * np.array(SIZES) / sum(SIZES)
    x, c, own = 0.0, 0.0, np.zeros(3)
    for _ in range(3):
        y = np.full(3, x)
        for _ in range(steps):
            y = y - lr * (a * (y - b) + c / omega - own)
        new = own - c + (x - y) / (steps * lr)
        c = c + np.sum(omega * (new - own)) / 3
        x, own = y.mean(), new
    assert trainer.server.state["y"].item() == pytest.approx(x, rel=1e-5)
    assert method.global_variate["y"].item() == pytest.approx(c, rel=1e-4)
    found = [trainer.client.memories()[k]["scaffold"]["variate"]["y"].item() for k in range(3)]
    assert found == pytest.approx(own, rel=1e-4)


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


def test_scaffold_by_gradients_takes_any_optimizer(run):
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(Adam, lr=0.01))
    assert_finite(*run([SCAFFOLD(variate="gradients")], model=model))


@pytest.mark.parametrize("clip", [None, 1.0], ids=["free", "clipped"])
def test_scaffolds_gradients_are_what_the_optimizer_gets_less_the_correction(run, clip):
    """So that they are the displacement, whatever is clipped, and in later rounds too."""
    found = []
    for variate in ("displacement", "gradients"):
        method = SCAFFOLD(variate=variate)
        _, trainer = settle(run, [method], local_steps=3, max_rounds=3, gradient_clip_val=clip)
        own = [trainer.client.memories()[k]["scaffold"]["variate"]["y"].item() for k in range(3)]
        found.append([method.global_variate["y"].item(), *own])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    if clip is not None:
        # in the first round, where nothing is corrected, no gradient is larger than the clip
        method = SCAFFOLD(variate="gradients")
        settle(run, [method], local_steps=3, max_rounds=1, gradient_clip_val=clip)
        assert abs(method.global_variate["y"].item()) <= 1


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
    states = [
        run(methods, model=plain_sgd_model(), max_rounds=3, gradient_clip_val=clip, local_epochs=2)[0]
        for clip in (None, 1e6)
    ]
    assert len(visits) == 2 * 3 * 4
    assert_same_bits(*states)


def test_scaffolds_gradients_do_not_depend_on_its_place_in_the_list(run):
    found = []
    for order in (1, -1):
        method = SCAFFOLD(variate="gradients")
        settle(run, [method, FedProx(0.3)][::order], local_steps=3, max_rounds=3)
        found.append(method.global_variate["y"].item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_after_clipping_a_method_reads_what_the_optimizer_gets(run):
    norms = []

    class Watch(Method):
        def on_after_clipping(self, client, optimizer):
            gradients = [client.live[name].grad for name in client.trainable]
            norms.append(torch.stack([g.norm() for g in gradients]).norm().item())

    run([Watch(), FedProx(10.0)], max_rounds=1, gradient_clip_val=0.01)
    assert max(norms) == pytest.approx(0.01, rel=1e-3)
