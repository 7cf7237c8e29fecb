"""Ditto, APFL and pFedMe train a personal model of each client in addition to the global one."""

from functools import partial

import pytest
import torch
from helpers.errors import warned
from helpers.quadratics import A, B, Curved, curved_data
from helpers.runs import assert_same_bits, differs, plain_sgd_model, small_data
from helpers.softmax_regression import Softmax, V, W, assert_printed, fit
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.callbacks import PersonalAccuracy
from fl_lightning.core.state import select
from fl_lightning.data import Pooled
from fl_lightning.methods import APFL, Ditto, Local, PFedMe

HEAD = "head.weight"
# the batch A, and one step on it from W
STEPPED = (0.14258493, 0.19648713, -0.00577486, -0.12220585, 0.26318993, 0.02571872)


def kept(trainer, name, k=0):
    return trainer.client.memories()[k][name]


def own(trainer, name):
    """The personal model of each client that has one."""
    memories = trainer.client.memories()
    return {k: memories[k][name]["model"] for k in memories if name in memories[k]}


def from_v(kind, **memory):
    """The method, whose personal models begin at V."""
    begun = {"model": {HEAD: V.clone()}, **memory}
    return type("FromV", (kind,), {"initial_memory": lambda self, client: begun})


@pytest.mark.parametrize(
    ("lambda_", "expected"),
    [
        (1, (0.05224375, 0.11097849, 0.16822401, -0.03238000, -0.09046776, 0.29140151)),
        (0, (0.04224375, 0.10097849, 0.18822401, -0.02238000, -0.13046776, 0.32140151)),
    ],
)
def test_the_worked_example_of_ditto(tmp_path, lambda_, expected):
    trainer = fit(tmp_path, [from_v(Ditto)(lambda_)])
    assert_printed(trainer.server.state[HEAD], *STEPPED)
    assert_printed(kept(trainer, "ditto")["model"][HEAD], *expected)


@pytest.mark.parametrize(("decay", "alpha"), [(0.0, 0.26386989), (0.02, 0.26336989)])
def test_the_worked_example_of_apfl(tmp_path, decay, alpha):
    trainer = fit(tmp_path, [from_v(APFL, alpha=0.25)(adaptive=True, alpha_decay=decay)])
    assert_printed(trainer.server.state[HEAD], *STEPPED)
    numbers = (0.01061493, 0.09938579, 0.19820670, -0.00556646, -0.10882163, 0.30618067)
    assert_printed(kept(trainer, "apfl")["model"][HEAD], *numbers)
    assert kept(trainer, "apfl")["alpha"] == pytest.approx(alpha, abs=1e-8)


PFEDME = {
    "A": (
        (0.12638488, 0.19782598, -0.00358255, -0.11378493, 0.27719767, 0.01595895),
        (0.10395773, 0.19967390, -0.00053738, -0.10206774, 0.29657965, 0.00239384),
    ),
    "AB": (
        (0.08932207, 0.19648443, 0.03256286, -0.09957177, 0.27811507, 0.00308734),
        (0.10176238, 0.19919548, 0.00442765, -0.10169334, 0.29380996, 0.00249787),
    ),
}


def slower(rate, **kwargs):
    model = Softmax()
    model.optimizer = partial(SGD, lr=rate, **kwargs)
    return model


@pytest.mark.parametrize("batches", PFEDME)
def test_the_worked_example_of_pfedme(tmp_path, batches):
    how = {"names": batches, "model": slower(0.05), "sizes": [2 * len(batches)]}
    trainer = fit(tmp_path, [PFedMe(15, 2, outer_lr=0.01)], **how)
    theta, local = PFEDME[batches]
    assert_printed(kept(trainer, "pfedme")["model"][HEAD], *theta)
    assert_printed(trainer.server.state[HEAD], *local)
    trainer = fit(tmp_path, [PFedMe(15, 2, outer_lr=0.01, personal="local")], **(how | {"model": slower(0.05)}))
    assert_printed(kept(trainer, "pfedme")["model"][HEAD], *local)


# ---------------------------------------------------------------------- laws
@pytest.mark.parametrize("method", [Ditto(0.5), APFL(0.5, adaptive=True)], ids=["ditto", "apfl"])
def test_the_personal_model_never_changes_what_is_sent(run, method):
    """Also with dropout, momentum, clipping and BatchNorm."""

    def state(*methods):
        torch.manual_seed(0)
        model = plain_sgd_model(momentum=0.9)
        model.encoder.layers.append(torch.nn.Dropout(0.2))
        return run(methods, model=model, gradient_clip_val=0.5)

    plain, personal = state(), state(method)
    assert_same_bits(plain[0], personal[0])
    assert plain[1].metrics["bytes/up"] == personal[1].metrics["bytes/up"]
    models = [*own(personal[1], method.name).values()]
    assert len(models) == 4 and differs(models[0], models[1]) and differs(models[0], plain[0])


@pytest.mark.parametrize("method", [Ditto(0), APFL(1.0)], ids=["ditto", "apfl"])
def test_a_personal_model_without_the_global_one_is_that_of_local(run, method):
    """Both begin with the model of round 0, since all clients take part in it."""
    local = run([Local()], model=plain_sgd_model())[1]
    personal = run([method], model=plain_sgd_model())[1]
    for k, model in own(personal, method.name).items():
        for name, value in local.client.memories().own_entries(k).items():
            torch.testing.assert_close(model[name], value, msg=name)


def test_ditto_takes_the_step_of_fedavg_from_the_global_model_whatever_the_coefficient(tmp_path):
    for lambda_ in (0.0, 3.0):
        assert_printed(kept(fit(tmp_path, [Ditto(lambda_)]), "ditto")["model"][HEAD], *STEPPED)


def curved(run, methods, rate, curvatures, targets, start=0.0, **options):
    """Clients with the losses a_k (w - c_k)^2 / 2."""
    data = curved_data(curvatures, targets)
    return run(methods, model=Curved(start, rate), data=data, precision="64-true", **options)


def test_ditto_settles_where_its_gradient_is_the_pull(run):
    """One client: w settles at c, v at the same c; two clients: v_k between c_k and w."""
    state, trainer = curved(run, [Ditto(2.0)], 0.1, A, B, max_rounds=300, local_steps=1)
    w = next(iter(state.values()))
    for k, model in own(trainer, "ditto").items():
        (v,) = model.values()
        torch.testing.assert_close(A[k] * (v - B[k]), -2.0 * (v - w))


def test_the_pull_of_ditto_alone_shrinks_the_distance(tmp_path):
    """The gradient of a model at its optimum is 0 for the labels of equal logits."""
    far = from_v(Ditto)(2.0)
    trainer = fit(tmp_path, [far], model=Silent(), local_epochs=3)
    torch.testing.assert_close(kept(trainer, "ditto")["model"][HEAD] - W, (1 - 0.1 * 2.0) ** 3 * (V - W))


class Silent(Softmax):
    """Its loss has no gradient but 0."""

    def loss(self, batch):
        return 0 * super().loss(batch)


def test_apfl_without_a_share_is_the_global_model_and_its_personal_parameters_stay(run):
    _, trainer = run([APFL(0.0)], callbacks=[PersonalAccuracy(fine_tune_steps=0), Equal()])
    models = [select(model, trainer.client.trainable) for model in own(trainer, "apfl").values()]
    assert len(models) == 4 and not any(differs(models[0], model) for model in models)


class Equal(PersonalAccuracy):
    """Fails unless all personal models have the parameters of the global one."""

    file = "equal.npz"

    def measure(self, trainer):
        for k in range(4):
            assert not differs(select(trainer.server.state, trainer.client.trainable), trainer.personal_state(k))


def test_apfl_of_equal_models_mixes_to_them_and_does_not_move_alpha(tmp_path):
    trainer = fit(tmp_path, [APFL(0.3, adaptive=True)])
    assert kept(trainer, "apfl")["alpha"] == 0.3
    step = (torch.tensor(STEPPED, dtype=torch.float64).reshape(3, 2) - W) * 0.3
    torch.testing.assert_close(kept(trainer, "apfl")["model"][HEAD], W + step, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("alpha", "rate"), [(0.01, 30.0), (0.99, 30.0)])
def test_alpha_stays_within_0_and_1_and_moves_once_a_visit(run, alpha, rate):
    """Client 0 gains from its own model, v - y grows with the rate."""
    _, trainer = curved(run, [APFL(alpha, adaptive=True)], 0.5, A, B, max_rounds=4, local_steps=2)
    alphas = [trainer.client.memories()[k]["apfl"]["alpha"] for k in range(len(A))]
    assert all(0 <= value <= 1 for value in alphas) and any(value != alpha for value in alphas)
    assert trainer.metrics["train/apfl/alpha"] == pytest.approx(sum(alphas) / len(alphas))


@pytest.mark.parametrize("options", [{"lambda_": 0.0}, {"lambda_": 5.0, "beta": 0.0}])
def test_pfedme_without_lambda_or_beta_keeps_the_global_model(run, options):
    method = PFedMe(**options)
    state, trainer = run([method], model=plain_sgd_model(lr=0.05))
    trained = {name for name, value in plain_sgd_model().named_parameters()}
    begun = plain_sgd_model().state_dict()
    assert not differs({n: state[n] for n in trained}, {n: begun[n] for n in trained})
    assert all(differs({n: model[n] for n in trained}, begun) for model in own(trainer, "pfedme").values())


def test_pfedme_whose_local_model_follows_at_once_is_at_theta(tmp_path):
    """eta lambda = 1; so the global model of one client is theta."""
    trainer = fit(tmp_path, [PFedMe(4.0, 3, outer_lr=0.25)], local_epochs=2)
    torch.testing.assert_close(trainer.server.state[HEAD], kept(trainer, "pfedme")["model"][HEAD])


def test_pfedme_with_many_steps_finds_the_proximal_point(run):
    """theta = (a c + lambda x) / (a + lambda) for the loss a (w - c)^2 / 2, before x moves."""
    _, trainer = curved(run, [PFedMe(3.0, 200, outer_lr=1e-12)], 0.1, A, B, start=0.5, max_rounds=1, local_steps=1)
    for k, model in own(trainer, "pfedme").items():
        (theta,) = model.values()
        torch.testing.assert_close(theta, torch.full_like(theta, (A[k] * B[k] + 3.0 * 0.5) / (A[k] + 3.0)))


def test_pfedme_of_equal_clients_is_that_of_one(tmp_path):
    states = [fit(tmp_path, [PFedMe(5.0, 2)], names=names).server.state for names in ("A", "AA")]
    torch.testing.assert_close(states[0][HEAD], states[1][HEAD])


@pytest.mark.parametrize("method", [Ditto(), APFL(), PFedMe(5.0)], ids=["ditto", "apfl", "pfedme"])
def test_a_new_client_uses_the_global_model(run, method):
    point = "trained/" if method.name == "pfedme" else ""
    personal = PersonalAccuracy(fine_tune_steps=0)
    _, trainer = run([method], model=plain_sgd_model(), callbacks=[personal, New(method)], cohort_size=1, max_rounds=1)
    assert f"personal/{point}accuracy" in trainer.metrics


class New(Equal):
    """Fails unless the personal models of new clients alone are the global one."""

    file = "new.npz"

    def __init__(self, method):
        super().__init__()
        self.name = method.name

    def measure(self, trainer):
        (trained,) = own(trainer, self.name)
        for k in range(4):
            assert differs(trainer.server.state, trainer.personal_state(k)) == (k == trained)


class KeepsBias(Method):
    """The bias stays with each client."""

    def exchanges(self, key):
        return key != "head.bias"


def test_ditto_pulls_no_entry_that_stays_with_the_client(tmp_path):
    bias = torch.ones(3, dtype=torch.float64)
    far = from_v(Ditto)
    far.initial_memory = lambda self, client: {"model": {HEAD: V.clone(), "head.bias": bias}}
    trainer = fit(tmp_path, [far(2.0), KeepsBias()], model=Silent(bias=True))
    model = kept(trainer, "ditto")["model"]
    torch.testing.assert_close(model[HEAD] - W, (1 - 0.1 * 2.0) * (V - W))
    assert torch.equal(model["head.bias"], bias)


def test_a_step_of_ditto_beyond_the_anchor_is_warned_of(run):
    with warned("Ditto", "lambda_=15", "overshoots"):
        run([Ditto(15.0)], model=plain_sgd_model(), data=small_data(num_clients=1, partitioner=Pooled()), max_rounds=0)
