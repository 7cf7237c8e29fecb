"""Methods for LoRA adapters: the mean of products is not the product of means."""

import numpy as np
import pytest
import torch
from helpers.errors import refused, warned
from helpers.lora import effective, lora_model
from helpers.quadratics import repeated_rows
from helpers.runs import assert_same_bits, differs, small_data
from helpers.tiny import variant
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD

from fl_lightning import Method, optim
from fl_lightning.callbacks import Callback, SpectrumMonitor
from fl_lightning.client.lora import lora_adapters
from fl_lightning.functional import effective_rank, low_rank_factors, singular_values
from fl_lightning.methods import (
    SCAFFOLD,
    FedExLoRA,
    FedIT,
    FedPer,
    FedProx,
    FFALoRA,
    HetLoRA,
    LoRAProduct,
)
from fl_lightning.models import MLP, ETFClassifier, ImageClassifier, with_lora
from fl_lightning.models.lora import LoRALinear

A, B = "layer.lora_A.weight", "layer.lora_B.weight"


class Adapted(LightningModule):
    """A layer with an adapter, whose factors a client sets to those that its examples hold, by one step."""

    def __init__(self, rows=2, columns=2, rank=1, first=None):
        super().__init__()
        self.layer = LoRALinear(nn.Linear(columns, rows, bias=False), rank, alpha=rank).double()
        if first is not None:
            self.layer.lora_A.weight.data.copy_(first)

    def training_step(self, batch, batch_idx):
        a, b = self.layer.lora_A.weight, self.layer.lora_B.weight
        target_a, target_b = batch[0].mean(0).split([a.numel(), b.numel()])
        return 0.5 * ((a.flatten() - target_a).square().sum() + (b.flatten() - target_b).square().sum())

    def configure_optimizers(self):
        return SGD([value for value in self.parameters() if value.requires_grad], lr=1.0)


def factors(k, rows=2, columns=2, rank=1):
    """The factors A and B of a client, which float32 holds."""
    rng = torch.Generator().manual_seed(k)
    return tuple(torch.randn(*shape, generator=rng).double() for shape in ((rank, columns), (rows, rank)))


def aggregate(run, methods, clients, sizes=None, first=None, **kwargs):
    """The effective change B A of the global model after one round, and its state."""
    (rank, columns), rows = clients[0][0].shape, len(clients[0][1])
    data = repeated_rows([torch.cat([a.flatten(), b.flatten()]).tolist() for a, b in clients], sizes)
    model = Adapted(rows, columns, rank, first)
    before = model.layer.base_layer.weight.detach().clone()
    state, trainer = run(methods, model=model, data=data, max_rounds=1, precision="64-true", **kwargs)
    moved = state["layer.base_layer.weight"] - before
    return moved + state[B] @ state[A], state, trainer


def mean_product(clients, sizes=None):
    sizes = sizes or [1] * len(clients)
    return sum(n * b @ a for n, (a, b) in zip(sizes, clients, strict=True)) / sum(sizes)


PAIR = [
    (torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[1.0], [0.0]], dtype=torch.float64)),
    (torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([[2.0], [1.0]], dtype=torch.float64)),
]
EXAMPLE = {
    "FedExLoRA": (FedExLoRA(), [[0.25, 2.0], [0.0, 0.75]]),
    "FedIT": (FedIT(), [[0.4375, 2.1875], [0.1875, 0.9375]]),
    "FFALoRA": (FFALoRA(), [[1.75, 3.5], [0.75, 1.5]]),
    "LoRAProduct": (LoRAProduct(), [[0.21990708, 2.00330337], [0.08134892, 0.74107015]]),
}


@pytest.mark.parametrize("name", EXAMPLE)
def test_two_clients_with_factors_of_rank_one_by_hand(run, name):
    method, expected = EXAMPLE[name]
    product, *_ = aggregate(run, [method], PAIR, [1, 3], first=PAIR[0][0])
    torch.testing.assert_close(product, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0)


ALL = {"FedIT": FedIT, "FFALoRA": FFALoRA, "LoRAProduct": LoRAProduct, "FedExLoRA": FedExLoRA}
ALL["HetLoRA"] = lambda: HetLoRA([2], "examples")
EXACT = {"FFALoRA": FFALoRA, "LoRAProduct": LoRAProduct, "FedExLoRA": FedExLoRA}


@pytest.mark.parametrize("name", ALL)
def test_equal_clients_give_the_product_of_one(run, name):
    shape = {"rows": 3, "columns": 4, "rank": 2}
    a, b = factors(0, **shape)
    product, *_ = aggregate(run, [ALL[name]()], [(a, b)] * 3, [1, 2, 3], first=a)
    torch.testing.assert_close(product, b @ a, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", EXACT)
def test_the_product_is_the_mean_product_if_the_adapter_can_hold_it(run, name):
    shape = {"rows": 3, "columns": 4, "rank": 2}
    clients = [factors(k, **shape) for k in range(3)]
    if name == "FFALoRA":
        clients = [(clients[0][0], b) for _, b in clients]
    elif name == "LoRAProduct":  # with a common row and a common column, the mean product has rank 2
        row, column = clients[0][0][:1], clients[0][1][:, 1:]
        clients = [(torch.cat([row, a[1:]]), torch.cat([b[:, :1], column], 1)) for a, b in clients]
    product, *_ = aggregate(run, [EXACT[name]()], clients, [1, 2, 3], first=clients[0][0])
    torch.testing.assert_close(product, mean_product(clients, [1, 2, 3]), atol=1e-12, rtol=0)


def test_fedit_is_fedavg_bit_for_bit_and_misses_the_mean_product_by_the_covariance_of_the_factors(run):
    product, state, _ = aggregate(run, [FedIT()], PAIR, [1, 3])
    fedavg = aggregate(run, [], PAIR, [1, 3])[1]
    assert_same_bits({name: state[name] for name in (A, B)}, {name: fedavg[name] for name in (A, B)})
    error = sum(p * (b - state[B]) @ (a - state[A]) for p, (a, b) in zip((0.25, 0.75), PAIR, strict=True))
    torch.testing.assert_close(product + error, mean_product(PAIR, [1, 3]))
    assert error.abs().min() > 0.1


@pytest.mark.parametrize("rank", [1, 2])
def test_lora_product_is_the_best_approximation_of_its_rank(run, rank):
    shape = {"rows": 5, "columns": 4, "rank": 3}
    clients = [factors(k, **shape) for k in range(3)]
    first = factors(9, **shape)[0]
    product, state, _ = aggregate(run, [LoRAProduct(rank)], clients, first=first)
    exact = mean_product(clients)
    values = singular_values(exact)
    assert torch.linalg.matrix_rank(product) == rank
    torch.testing.assert_close(torch.linalg.matrix_norm(product - exact), values[rank:].square().sum().sqrt())
    # the next round can train the remaining rows and columns
    assert not state[B][:, rank:].any() and torch.equal(state[A][rank:], first[rank:])


@pytest.mark.parametrize("name", ALL)
def test_nothing_moves_where_all_b_are_0(run, name):
    a, b = factors(0, 3, 4, 2)
    product, state, _ = aggregate(run, [ALL[name]()], [(a, torch.zeros_like(b))] * 2, first=a)
    assert not product.any() and torch.equal(state[A], a)


@pytest.mark.parametrize("name", ALL)
def test_a_client_without_a_step_does_not_count_and_a_round_without_any_changes_nothing(run, name):
    a, b = factors(0, 3, 4, 2)
    with warned("data"):
        product, *_ = aggregate(run, [ALL[name]()], [(a, b), (a, b)], [4, 0], first=a)
    torch.testing.assert_close(product, b @ a)
    with warned("round 0"):
        state, _ = run([ALL[name](), Nothing()], model=lora_model(), max_rounds=1)
    assert_same_bits(state, lora_model().state_dict())


@pytest.mark.parametrize("name", ["FFALoRA", "FedExLoRA"])
def test_after_each_round_the_effective_weights_are_the_means_of_the_clients(run, name):
    """The base that has changed travels, and the cohort of the next round starts from it."""

    class Watch(Callback):
        def on_round_start(self, trainer):
            self.local, self.weights = [], []

        def on_client_end(self, trainer, client):
            assert_same_bits(client.received, trainer.server.state)
            self.local.append(effective(client.module, client.state()))
            self.weights.append(client.weight)

        def on_round_end(self, trainer):
            for path, weight in effective(trainer.client.module, trainer.server.state).items():
                mean = sum(n * one[path] for n, one in zip(self.weights, self.local, strict=True)) / sum(self.weights)
                torch.testing.assert_close(weight, mean, atol=1e-12, rtol=0)

    model = lora_model(alpha=12.0)
    before = {name: value.clone() for name, value in model.state_dict().items() if "base_layer" in name}
    how = {"max_rounds": 3, "precision": "64-true", "participation": 0.75, "callbacks": [Watch()]}
    state, _ = run([ALL[name]()], model=model, **how)
    moved = {entry for entry, value in before.items() if not torch.equal(state[entry], value.double())}
    assert moved == ({entry for entry in before if "weight" in entry} if name == "FedExLoRA" else set())


class Nothing(Method):
    """Gives all clients the weight 0."""

    def client_weight(self, client):
        return 0.0


# ---------------------------------------------------------------- the factors of a matrix
def test_the_factors_do_not_depend_on_how_a_product_is_split_and_their_signs_are_fixed():
    a, b = factors(0, 5, 4, 3)
    mix = torch.linalg.qr(factors(1, 3, 3, 3)[0]).Q
    found = low_rank_factors(b @ a, a)
    for other in ((2 * b) @ (a / 2), (b @ mix) @ (mix.T @ a)):
        for one, same in zip(found, low_rank_factors(other, a), strict=True):
            torch.testing.assert_close(one, same)
    new_b, new_a = found
    assert (new_b.gather(0, new_b.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(new_b.norm(dim=0), new_a.norm(dim=1))


@pytest.mark.parametrize("shape", [(5, 4, 3), (2, 7, 3), (7, 2, 3)])
def test_the_singular_values_of_an_adapter_are_those_of_its_product(shape):
    layer = LoRALinear(nn.Linear(shape[1], shape[0]), shape[2], 1.0)
    layer.lora_A.weight.data, layer.lora_B.weight.data = factors(0, *shape)
    (adapter,) = lora_adapters(nn.ModuleDict({"x": layer}))
    a, b = factors(0, *shape)
    found = adapter.singular_values({adapter.a: a, adapter.b: b})
    torch.testing.assert_close(found, singular_values(b @ a)[: min(shape)])


def test_rows_of_a_without_singular_value_stay_and_a_smaller_matrix_fits():
    a, b = factors(0, 5, 4, 1)
    old = factors(1, 5, 4, 3)[0]
    new_b, new_a = low_rank_factors(b @ a, old)
    torch.testing.assert_close(new_b @ new_a, b @ a)
    assert torch.equal(new_a[1:], old[1:]) and not new_b[:, 1:].any()
    wide = factors(2, 2, 4, 3)
    new_b, new_a = low_rank_factors(wide[1] @ wide[0], old)
    torch.testing.assert_close(new_b @ new_a, wide[1] @ wide[0])


# ---------------------------------------------------------------- training
FACTORS_A = [f"encoder.layers.{i}.0.lora_A.weight" for i in (1, 2)]


@pytest.mark.parametrize("server", [None, optim.FedAdam])
def test_ffalora_keeps_every_bit_of_a_and_b_learns(run, server):
    model = lora_model({"momentum": 0.9, "weight_decay": 0.1})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, _ = run([FFALoRA()], model=model, server_optimizer=server)
    frozen = {name for name in before if "base_layer" in name or "lora_A" in name}
    assert {*FACTORS_A} < frozen
    for name, value in state.items():
        assert torch.equal(value, before[name]) == (name in frozen), name


def test_ffalora_on_a_model_that_freezes_a_sends_b_alone(run):
    states = []
    for train_a in (True, False):
        model = lora_model(train_a=train_a)
        trained = sum(value.nbytes for value in model.parameters() if value.requires_grad)
        state, trainer = run([FFALoRA()], model=model)
        assert trainer.metrics["bytes/up"] == 4 * trained
        states.append(state)
    assert_same_bits(*states)


@pytest.mark.parametrize("methods", [[LoRAProduct()], [FedPer(2)]], ids=["global model", "own models"])
def test_the_spectrum_of_each_product_is_logged_and_stored(run, undrawn, methods):
    monitor = SpectrumMonitor(lora=True, local_models=True)
    state, trainer = run(methods, model=lora_model(), callbacks=[monitor])
    spectra = np.load(trainer.run_dir / "spectra.npz")
    for adapter in lora_adapters(trainer.client.module):
        owns = [state | trainer.client.memories().own_entries(k) for k in range(4)]
        values = np.mean([singular_values(adapter.product(own))[:4] for own in owns], 0)
        name = f"lora/{adapter.path}"
        np.testing.assert_allclose(spectra[name][-1], values, rtol=1e-5)
        assert trainer.metrics[f"spectrum/{name}/00"] == pytest.approx(values[0])
        assert trainer.metrics[f"rank/{name}/effective"] == pytest.approx(float(effective_rank(torch.tensor(values))))
        assert spectra[f"local_{name}"].shape == (2, 4, 4)
        assert f"spectrum/{name}" in {plot.name for plot in monitor.plot({"": [dict(spectra)]})}


# ---------------------------------------------------------------- names of adapters
class Peft(nn.Module):
    """A layer as peft builds it, with the adapter ``default``."""

    def __init__(self, base, a, b, **kwargs):
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), {"default": 2.0}
        self.lora_A, self.lora_B = nn.ModuleDict({"default": a}), nn.ModuleDict({"default": b})
        vars(self).update(kwargs)


class PeftEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer, self.scaling = nn.Embedding(7, 5), {"default": 2.0}
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(3, 7))})
        self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.randn(5, 3))})


class Loralib(nn.Linear):
    def __init__(self):
        super().__init__(4, 6)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(6, 3))
        self.scaling = 2.0


class Transposed(nn.Module):
    """The weight of GPT-2's layers, ``(in, out)``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))


def peft_linear(base=None, **kwargs):
    return Peft(base or nn.Linear(4, 6), nn.Linear(4, 3, bias=False), nn.Linear(3, 6, bias=False), **kwargs)


def peft_convolution():
    base, a = nn.Conv2d(4, 6, 5), nn.Conv2d(4, 3, 5, bias=False)
    return Peft(base, a, nn.Conv2d(3, 6, 1, bias=False))


NAMED = {
    "peft": (peft_linear, "x.base_layer.weight", "x.default", (6, 4)),
    "peft of GPT-2": (
        lambda: peft_linear(Transposed(), fan_in_fan_out=True),
        "x.base_layer.weight",
        "x.default",
        (6, 4),
    ),
    "peft's convolution": (peft_convolution, "x.base_layer.weight", "x.default", (6, 100)),
    "peft's embedding": (PeftEmbedding, "x.base_layer.weight", "x.default", (5, 7)),
    "loralib": (Loralib, "x.weight", "x", (6, 4)),
    "with_lora": (lambda: LoRALinear(nn.Linear(4, 6), 3, 6.0), "x.base_layer.weight", "x", (6, 4)),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_adapters_of_other_packages_are_found_with_their_base(name):
    build, base, path, shape = NAMED[name]
    module = nn.ModuleDict({"x": build(), "y": nn.Linear(2, 2)})
    (found,) = lora_adapters(module)
    assert (found.base, found.path, found.scaling) == (base, path, 2.0)
    product, weight = found.product(module.state_dict()), module.state_dict()[base]
    assert product.shape == shape and product.dtype == torch.float64
    assert (product.T if found.transposed else product).numel() == weight.numel()
    assert found.transposed == (name in ("peft of GPT-2", "peft's embedding"))


class Moves(LightningModule):
    """Moves the factors of its adapters by amounts that depend on the client, without a forward."""

    def __init__(self, layer):
        super().__init__()
        self.x = layer

    def training_step(self, batch, batch_idx):
        number = batch[0].mean()
        trained = [value.flatten() for name, value in self.named_parameters() if "lora_" in name]
        return sum((value - torch.sin(number * torch.arange(len(value)))).square().sum() for value in trained)

    def configure_optimizers(self):
        return SGD([value for name, value in self.named_parameters() if "lora_" in name], lr=0.1)


@pytest.mark.parametrize("name", NAMED)
def test_fedexlora_adds_the_error_to_a_base_of_any_layout(run, name):
    torch.manual_seed(0)
    model, local = Moves(NAMED[name][0]()), []
    for entry, value in model.named_parameters():
        value.requires_grad_("lora_" in entry)

    class Watch(Callback):
        def on_client_end(self, trainer, client):
            local.append(effective(client.module, client.state()))

    how = {"max_rounds": 1, "precision": "64-true", "callbacks": [Watch()]}
    state, _ = run([FedExLoRA()], model=model, data=repeated_rows([(1.0, 1.0), (2.0, 2.0)]), **how)
    for path, weight in effective(model, state).items():
        torch.testing.assert_close(weight, (local[0][path] + local[1][path]) / 2, atol=1e-12, rtol=0)
    assert differs(local[0], local[1])


def test_with_lora_begins_as_the_model_itself_and_trains_adapters_and_classifier():
    torch.manual_seed(0)
    plain, x = ImageClassifier(MLP(64, [32, 24])), torch.randn(5, 64)
    adapted = lora_model(rank=3)
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    layers = [f"encoder.layers.{i}.0.lora_{factor}.weight" for i in (1, 2) for factor in "AB"]
    assert trained == {*layers, "classifier.weight", "classifier.bias"}
    torch.testing.assert_close(adapted(x), plain(x))
    assert len(lora_adapters(adapted)) == 2
    assert [len(adapted.state_dict()[adapter.a]) for adapter in lora_adapters(adapted)] == [3, 3]


def test_a_layer_in_two_places_has_one_adapter():
    layer = nn.Linear(4, 4)
    module = with_lora(nn.Sequential(nn.Sequential(layer), layer))
    assert isinstance(module[1], LoRALinear) and module[0][0] is module[1]


class Attention(nn.Module):
    """torch's own attention, which reads the weight of its last layer instead of calling the layer."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("build", [Attention, lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
@pytest.mark.parametrize("train", [True, False])
def test_a_module_that_reads_the_weights_of_its_layers_reads_them_with_their_adapters(build, train):
    torch.manual_seed(0)
    adapted, x = with_lora(build().train(train), rank=2), torch.randn(3, 5, 8)
    for name, value in adapted.named_parameters():
        value.data = torch.randn_like(value) if "lora_B" in name else value.data
    merged = build().train(train)
    changed = {f"{path}.weight": weight.float() for path, weight in effective(adapted, adapted.state_dict()).items()}
    base = {
        name.replace("base_layer.", ""): value for name, value in adapted.state_dict().items() if "lora" not in name
    }
    merged.load_state_dict(base | changed)
    for part in (adapted, merged):
        torch.manual_seed(1)  # dropout
        part.output = part(x)
    torch.testing.assert_close(adapted.output, merged.output)
    adapted.output.sum().backward()
    assert all(value.grad.any() for name, value in adapted.named_parameters() if "lora_A" in name)


# ---------------------------------------------------------------- refusals
class Unscaled(Adapted):
    def __init__(self):
        super().__init__()
        del self.layer.scaling


def test_what_has_no_adapter_or_does_not_scale_it_is_refused(run):
    with refused("with_lora.rank=0"):
        lora_model(rank=0)
    with refused("with_lora.module='Sequential'"):
        with_lora(nn.Sequential(nn.ReLU()))
    with refused("with_lora.module='ETFClassifier'"):
        with_lora(ImageClassifier(MLP(64), classifier=ETFClassifier))
    with refused("FedExLoRA", "adapter='layer'", "scaling"):
        run([FedExLoRA()], model=Unscaled())


def test_adapters_that_stay_with_the_clients_are_left_out(run):
    state, trainer = run([LoRAProduct(), FedPer(2)], model=lora_model(), data=small_data(train_size=120, test_size=50))
    assert all(torch.isfinite(value).all() for value in state.values())
    assert {name.split(".lora_")[0] for name in trainer.client.kept if "lora" in name} == {"encoder.layers.2.0"}


def test_what_acts_on_the_factors_is_warned_of(run):
    with warned("LoRAProduct", "SCAFFOLD"):
        run([LoRAProduct(), SCAFFOLD()], model=lora_model())
    with warned("LoRAProduct", "trainer.server_optimizer", "FedAvgM"):
        run([LoRAProduct()], model=lora_model(), server_optimizer=optim.FedAvgM)
    run([FFALoRA(), SCAFFOLD()], model=lora_model(), server_optimizer=optim.FedAvgM)  # a warning would be an error


# ---------------------------------------------------------------- adapters of different ranks
RANKS = [
    (torch.tensor([[1.0, 2, 0], [0, 0, 0]], dtype=torch.float64), torch.tensor([[1.0, 0], [0, 0]]).double()),
    (torch.tensor([[0.0, 1, 1], [1, 0, -1]], dtype=torch.float64), torch.tensor([[2.0, 1], [1, -1]]).double()),
]
HET = {
    "norm": [
        [1.0000000000000002, 2.2383966075724935, 0.6077190439407381],
        [-0.13092582879575135, 0.8461156515132314, 0.7386448727364894],
    ],
    "examples": [[1.0, 2.1875, 0.75], [-0.375, 0.9375, 1.125]],
    "component": [[1.4375, 2.1875, 0.3125], [-0.8125, 0.9375, 1.5625]],
}


@pytest.mark.parametrize("weights", HET)
def test_two_clients_of_different_ranks_by_hand(run, weights):
    product, state, _ = aggregate(run, [HetLoRA([1, 2], weights)], RANKS, [1, 3])
    torch.testing.assert_close(product, torch.tensor(HET[weights]).double(), atol=1e-6, rtol=0)
    if weights == "norm":
        torch.testing.assert_close(product, torch.tensor(HET[weights], dtype=torch.float64), atol=1e-9, rtol=0)
        p = torch.tensor([0.392280956059262, 0.6077190439407381], dtype=torch.float64)
        for entry, place in ((A, 0), (B, 1)):
            wanted = torch.tensordot(p, torch.stack([client[place] for client in RANKS]), 1)
            torch.testing.assert_close(state[entry], wanted, atol=1e-9, rtol=0)
    if weights == "component":  # that client's alone
        torch.testing.assert_close(state[A][1], RANKS[1][0][1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("weights", ["examples", "component"])
def test_a_client_of_weight_0_moves_no_component(run, weights):
    first_only = variant(Method, client_weight=lambda self, client: float(client.info.id == 0))()
    product, state, _ = aggregate(run, [HetLoRA([1, 2], weights), first_only], RANKS)
    torch.testing.assert_close(product, RANKS[0][1] @ RANKS[0][0], atol=1e-12, rtol=0)
    assert state[A].isfinite().all()


@pytest.mark.parametrize("weights", HET)
def test_one_client_keeps_its_factors(run, weights):
    product, *_ = aggregate(run, [HetLoRA([2], weights)], RANKS[1:])
    torch.testing.assert_close(product, RANKS[1][1] @ RANKS[1][0], atol=1e-12, rtol=0)


def test_equal_ranks_weighted_by_examples_are_fedavg_bit_for_bit(run):
    plain, _ = run([], model=lora_model(), data=small_data())
    for weights in ("examples", "component"):
        assert_same_bits(run([HetLoRA([4], weights)], model=lora_model(), data=small_data())[0], plain)


class Ends(Callback):
    def __init__(self):
        self.states = {}

    def on_client_end(self, trainer, client):
        self.states[client.info.id] = client.state()

    def on_last_round_end(self, trainer):
        self.evaluated = {k: trainer.personal_state(k) for k in self.states}


def test_a_client_trains_and_is_evaluated_with_its_first_components_and_sends_no_others(run):
    ends, ranks = Ends(), [1, 2, 4, 3]
    how = {"model": lora_model(), "data": small_data(), "callbacks": [ends], "max_rounds": 2}
    state, trainer = run([HetLoRA(ranks), FedProx(0.1)], **how)
    plain = run([FedIT(), FedProx(0.1)], **{**how, "model": lora_model(), "callbacks": []})[1]
    unsent = 0
    for k, rank in enumerate(ranks):
        for adapter in lora_adapters(trainer.client.module):
            a, b = ends.states[k][adapter.a], ends.states[k][adapter.b]
            assert not a[rank:].any() and not b[:, rank:].any() and a[:rank].all()
            assert torch.equal(ends.evaluated[k][adapter.a][:rank], state[adapter.a][:rank])
            assert not ends.evaluated[k][adapter.a][rank:].any()
            unsent += 4 * (a[rank:].numel() + b[:, rank:].numel())
    for tag in ("bytes/down", "bytes/up"):
        assert trainer.metrics[tag] == plain.metrics[tag] - unsent
