"""IFCA's clusters and FedAMP's mixtures: laws of both, then the values of the papers' formulas."""

import math
from functools import partial

import pytest
import torch
from helpers.errors import warned
from helpers.quadratics import Quadratic, quadratic_data
from helpers.runs import assert_same_bits, differs, small_trainer
from helpers.runs import train_in_turn as fit
from helpers.softmax_regression import V
from helpers.softmax_regression import fit as fit_softmax
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.callbacks import Callback
from fl_lightning.core.server import Server
from fl_lightning.methods import (
    IFCA,
    FedAMP,
    FedProx,
    Local,
)
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.optim import FedAdam


class Models(Callback):
    """Keeps the clients' models of the last round, and what they received."""

    def __init__(self):
        self.ends, self.received = {}, {}

    def on_client_end(self, trainer, client):
        self.ends[client.info.id] = client.state()
        self.received[client.info.id] = {name: value.clone() for name, value in client.received.items()}


def small():
    """A model without BatchNorm."""
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1))


def numbers(folder, methods, values, start=0.0, lr=0.1, **kwargs):
    """A run on a quadratic loss around a number for each client; return what each client ends with, and the trainer."""
    models = Models()
    options = {"max_rounds": 1, "local_steps": 1, "precision": "64-true", "callbacks": [models], "clients_per_step": 1}
    trainer = small_trainer(folder, **options | kwargs)
    trainer.fit(Quadratic(start=start, lr=lr), quadratic_data([float(value) for value in values]), methods)
    return {k: state["y"].item() for k, state in models.ends.items()}, trainer


# ---------------------------------------------------------------- laws of IFCA
def test_one_cluster_is_fedavg_bit_for_bit(tmp_path):
    for how in ({}, {"server_optimizer": partial(FedAdam, lr=0.01)}):
        assert_same_bits(fit(tmp_path, [IFCA(1)], **how)[0], fit(tmp_path, [], **how)[0])


def test_of_equal_models_all_clients_choose_the_first_and_train_as_in_fedavg(tmp_path):
    state, trainer = fit(tmp_path, [IFCA(3, init_std=0)], max_rounds=1)
    assert_same_bits(state, fit(tmp_path, [], max_rounds=1)[0])
    assert [trainer.metrics[f"ifca/clients/{c}"] for c in range(3)] == [4, 0, 0]


class Begins(IFCA):
    """Begins at these models of the entry y."""

    name = "ifca"

    def __init__(self, *starts):
        super().__init__(len(starts))
        self.starts = starts

    def on_fit_start(self, server):
        super().on_fit_start(server)
        for c, start in enumerate(self.starts):
            if c:
                self.models = {**self.models, str(c): {"y": torch.tensor([start], dtype=server.state["y"].dtype)}}
            else:
                server.assign({"y": torch.tensor([start])})


def test_clusters_with_far_optima_never_mix_after_a_right_round(tmp_path):
    values = [-3.0, 5.0, -3.2, 5.4, -2.8]
    _, trainer = numbers(tmp_path, [Begins(-1.0, 1.0)], values, max_rounds=30, lr=0.5)
    method = trainer.methods.methods[0]
    assert trainer.server.state["y"].item() == pytest.approx(-3.0, rel=1e-6)
    assert method.models["1"]["y"].item() == pytest.approx(5.2, rel=1e-6)
    assert [trainer.metrics[f"ifca/clients/{c}"] for c in (0, 1)] == [3, 2]


def test_a_permutation_of_the_models_permutes_the_results(tmp_path):
    starts, values, results = (-1.0, 0.5, 4.0), [-2.0, 0.2, 0.7, 9.0], []
    for order in ((0, 1, 2), (2, 0, 1)):
        _, trainer = numbers(tmp_path, [Begins(*(starts[c] for c in order))], values, max_rounds=3)
        models = {"0": trainer.server.state, **trainer.methods.methods[0].models}
        results.append({starts[start]: models[str(c)]["y"].item() for c, start in enumerate(order)})
    assert results[0] == results[1]


def test_a_model_that_nobody_chooses_stays(tmp_path):
    _, trainer = numbers(tmp_path, [Begins(99.0, 1.0)], [0.0, 2.0])
    assert trainer.server.state["y"].item() == 99
    assert [trainer.metrics[f"ifca/clients/{c}"] for c in (0, 1)] == [0, 2]


def test_shared_entries_are_averaged_over_all_clients_and_the_server_optimizer_moves_them_alone(tmp_path):
    shared = ["encoder", "projector"]
    state, trainer = fit(tmp_path, [IFCA(2, 1.0, shared)], server_optimizer=partial(FedAdam, lr=0.01))
    entries = {*trainer.methods.methods[0].models["1"]}
    assert entries == {name for name in state if name.startswith("classifier")}
    moments = trainer.server.optimizer.state_dict()["state"]
    for name, moment in zip(trainer.server.optimized, moments.values(), strict=True):
        moved = any(torch.is_tensor(value) and value.ndim and value.any() for value in moment.values())
        assert moved == (name not in entries)


def test_a_client_is_evaluated_with_the_model_of_its_last_choice_and_a_new_one_chooses(tmp_path):
    class Looks(Callback):
        def on_last_round_end(self, trainer):
            method = trainer.methods.methods[0]
            for k in range(3):
                self.models = {**getattr(self, "models", {}), k: trainer.personal_state(k)["y"].item()}
            self.choices = {k: trainer.client.memories().get(k, {}).get("ifca") for k in range(3)}
            self.server = trainer.server.state["y"].item(), method.models["1"]["y"].item()

    looks = Looks()
    only = lambda seed, round_, number, size: [0, 1]  # noqa: E731
    numbers(tmp_path, [Begins(-1.0, 1.0)], [-5.0, 5.0, 4.0], callbacks=[looks], cohort_size=2, sampler=only)
    assert looks.choices == {0: {"choice": 0}, 1: {"choice": 1}, 2: None}
    assert looks.models == {0: looks.server[0], 1: looks.server[1], 2: looks.server[1]}


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_loss_that_is_nan_is_a_failure_of_the_client(tmp_path):
    values = [1.0, math.nan, 3.0]
    _, trainer = numbers(tmp_path, [Begins(0.0, 2.0)], values, on_client_error="skip")
    assert trainer.metrics["clients/failed"] == 1 and trainer.metrics["clients"] == 2


# ---------------------------------------------------------------- laws of FedAMP
def mixture(method, models, k):
    """What client k receives if these are the last models."""
    server = Server({"w": torch.zeros(len(models[0]), dtype=torch.float64)}, ["w"], num_clients=len(models))
    method.reset(server)
    method.on_fit_start(server)
    method.models = {str(j): {"w": torch.tensor(model, dtype=torch.float64)} for j, model in enumerate(models)}
    return method.sent_state(server, k)["w"]


def weights(method, models):
    """The weights of the models for each client, from the mixtures of unit vectors beside them."""
    rows = [torch.tensor(model, dtype=torch.float64) for model in models]
    return torch.stack([method.weights([{"w": row} for row in rows], k) for k in range(len(rows))])


MODELS = [[1.0, 0.0], [1.0, 1.0], [-1.0, 0.5]]
BOTH = {"FedAMP": partial(FedAMP, 0.5, 2.0), "HeurFedAMP": partial(FedAMP, sigma=2.0, heuristic=True, own=0.4)}


@pytest.mark.parametrize("name", BOTH)
def test_the_weights_of_a_client_sum_to_1_and_one_client_has_its_own_model(name):
    torch.testing.assert_close(weights(BOTH[name](), MODELS).sum(1), torch.ones(3, dtype=torch.float64))
    assert mixture(BOTH[name](), MODELS[:1], 0).tolist() == MODELS[0]
    assert torch.equal(mixture(BOTH[name](), [MODELS[1]] * 3, 1), torch.tensor(MODELS[1], dtype=torch.float64))


def test_the_weights_by_distance_are_symmetric_and_with_a_small_sigma_each_client_has_its_own_model():
    found = weights(FedAMP(0.5, 2.0), MODELS)
    assert torch.equal(found, found.T)
    assert mixture(FedAMP(1e-4, 1e-3), MODELS, 0).tolist() == MODELS[0]


def test_the_weights_by_cosine_do_not_depend_on_the_size_of_the_models():
    method = BOTH["HeurFedAMP"]()
    larger = [[1000 * number for number in model] for model in MODELS]
    torch.testing.assert_close(weights(method, larger), weights(method, MODELS), rtol=1e-13, atol=0)
    assert weights(FedAMP(sigma=1e4, heuristic=True), MODELS).isfinite().all()
    assert weights(method, [[0.0, 0.0], [1.0, 0.0]]).tolist() == [[0.4, 0.6], [0.6, 0.4]]


def test_without_sigma_the_mixture_is_the_plain_mean_and_with_own_1_the_clients_own_model():
    mean = torch.tensor(MODELS, dtype=torch.float64).mean(0)
    torch.testing.assert_close(mixture(FedAMP(sigma=0, heuristic=True), MODELS, 2), mean)
    assert mixture(FedAMP(heuristic=True, own=1.0), MODELS, 2).tolist() == MODELS[2]


def test_the_plain_mean_is_fedavg_of_equal_weights(tmp_path):
    how = {"model": small, "precision": "64-true"}
    mean, _ = fit(tmp_path, [FedAMP(sigma=0, weight=0, heuristic=True)], **how)
    plain, _ = fit(tmp_path, [], weighting="uniform", **how)
    for name, value in plain.items():
        torch.testing.assert_close(mean[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "method", [partial(FedAMP, heuristic=True, own=1.0, weight=0), partial(FedAMP, weight=0, start="own")]
)
def test_without_a_share_of_the_others_or_a_pull_to_the_mixture_each_client_trains_alone(tmp_path, method):
    how = {"model": small, "precision": "64-true"}
    mixed, alone = Models(), Models()
    fit(tmp_path, [method()], callbacks=[mixed], **how)
    fit(tmp_path, [Local()], callbacks=[alone], **how)
    for k, state in alone.ends.items():
        for name, value in state.items():
            torch.testing.assert_close(mixed.ends[k][name], value, rtol=1e-12, atol=1e-14)


def test_fedprox_beside_it_pulls_to_the_mixture_and_the_first_step_has_no_pull(tmp_path):
    states = {}
    for name, methods in {
        "own term": [FedAMP()],
        "FedProx": [FedAMP(weight=0), FedProx(10.0)],
        "none": [FedAMP(weight=0)],
    }.items():
        states[name] = [fit(tmp_path, methods, local_steps=steps, max_rounds=2)[0] for steps in (1, 2)]
    for state in states.values():
        assert_same_bits(state[0], states["none"][0])
    assert_same_bits(states["own term"][1], states["FedProx"][1])
    assert differs(states["none"][1], states["FedProx"][1])


def test_the_global_model_is_the_mean_of_the_last_models_of_all_clients_so_far(tmp_path):
    drawn = [[0, 1], [1, 2]]
    models, how = Models(), {"sampler": lambda seed, round_, number, size: drawn[round_], "cohort_size": 2}
    ends, trainer = numbers(tmp_path, [FedAMP()], [1.0, 2.0, 9.0], max_rounds=2, callbacks=[models], **how)
    ends = {k: state["y"].item() for k, state in models.ends.items()}
    assert trainer.server.state["y"].item() == pytest.approx(sum(ends.values()) / 3)
    assert trainer.methods.methods[0].models.keys() == {"0", "1", "2"}
    # a new client starts with the mean so far
    first, _ = numbers(tmp_path, [FedAMP()], [1.0, 2.0, 9.0], sampler=how["sampler"], cohort_size=2)
    assert models.received[2]["y"].item() == pytest.approx(sum(first.values()) / 2)


# ---------------------------------------------------------------- values
def test_the_worked_examples_of_the_mixtures():
    heuristic = FedAMP(sigma=1.0, heuristic=True, own=0.4)
    wanted = [
        [0.4, 0.4993396018348621, 0.10066039816513785],
        [0.44137297182736523, 0.4, 0.15862702817263466],
        [0.21560820666240876, 0.3843917933375912, 0.4],
    ]
    assert_near(weights(heuristic, MODELS), wanted)
    mixtures = [
        [0.7986792036697242, 0.549669800917431],
        [0.6827459436547306, 0.47931351408631734],
        [0.2, 0.5843917933375913],
    ]
    assert_near(torch.stack([mixture(heuristic, MODELS, k) for k in range(3)]), mixtures)
    by_distance = FedAMP(0.5, 2.0)
    wanted = [
        [0.8185090930051617, 0.15163266492815836, 0.029858242066679905],
        [0.15163266492815836, 0.8185090930051617, 0.029858242066679905],
        [0.029858242066679905, 0.029858242066679905, 0.9402835158666402],
    ]
    assert_near(weights(by_distance, MODELS), wanted)
    mixtures = [
        [0.9402835158666402, 0.16656178596149832],
        [0.9402835158666402, 0.8334382140385017],
        [-0.8805670317332803, 0.5],
    ]
    assert_near(torch.stack([mixture(by_distance, MODELS, k) for k in range(3)]), mixtures)
    line = [[0.0], [1.0], [3.0]]
    assert_near(
        torch.cat([mixture(by_distance, line, k) for k in range(3)]), [0.15996441, 0.91603498, 2.92400061], 1e-8
    )


def assert_near(found, wanted, limit=1e-9):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=limit)


D = (torch.tensor([[0.2, 1], [-1, -0.5]]), [2, 2])


class Given(Method):
    """Weights the clients by 1, 1, 2, 1."""

    def client_weight(self, client):
        return [1.0, 1.0, 2.0, 1.0][client.info.id]


class FromV(IFCA):
    name = "ifca"

    def on_fit_start(self, server):
        super().on_fit_start(server)
        self.models = {"1": {"head.weight": V.clone()}}

    def losses(self, client):
        found = super().losses(client)
        seen[client.info.id] = [loss / client.info.num_examples for loss in found]
        return found


seen = {}


def test_the_worked_example_of_the_clusters(tmp_path):
    seen.clear()
    trainer = fit_softmax(tmp_path, [FromV(), Given()], "ABC", added=D, local_steps=1, clients_per_step=1)
    wanted = [
        [1.1416380540592521, 1.0167215596336026],
        [1.211250221544168, 0.9825287779644079],
        [1.0132944032499198, 1.0904509855228515],
        [1.1833959298417265, 1.007483824514286],
    ]
    assert_near(torch.tensor([seen[k] for k in range(4)], dtype=torch.float64), wanted)
    choices = [trainer.client.memories()[k]["ifca"]["choice"] for k in range(4)]
    assert choices == [1, 1, 0, 1]
    zero = [
        [0.059703982377539266, 0.20684414856879646],
        [0.010405876110295878, -0.1160952175702801],
        [0.32989014151216484, 0.009251069001483645],
    ]
    one = [
        [0.010876252627833274, 0.09829324222358155],
        [0.2159590253150704, -0.008905546590363467],
        [-0.12683527794290367, 0.3106123043667819],
    ]
    assert_near(trainer.server.state["head.weight"], zero)
    assert_near(trainer.methods.methods[0].models["1"]["head.weight"], one)


def test_a_large_pull_is_warned_of(tmp_path):
    with warned("FedAMP with the client optimizer's lr=0.1", "weight / a=15"):
        fit(tmp_path, [FedAMP(weight=1.5)], max_rounds=1)
