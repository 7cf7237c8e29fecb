"""FedALA starts a visit between the received model and the client's last one, at a point learned on its data."""

from functools import partial

import pytest
import torch
from helpers.errors import warned
from helpers.runs import assert_same_bits, plain_sgd_model
from helpers.softmax_regression import Softmax, V, W, assert_printed, fit
from helpers.tiny import variant

from fl_lightning import Method
from fl_lightning.core.state import clone
from fl_lightning.methods import FedALA


class OnAll(FedALA):
    """All entries have weights, and clients have been at V; ``weights`` of 1 are known, so that one pass follows."""

    def __init__(self, last=V, known=True, **given):
        super().__init__(**{"sample": 1.0, **given})
        self.given, self.known = last, known

    def setup(self, client, optimizer):
        self.upper = [*client.trainable]

    def initial_memory(self, client):
        known = {"weights": {"head.weight": torch.ones_like(W)}} if self.known else {}
        return {"last": {"head.weight": self.given.clone()}, **known}


EXAMPLE = {
    "A": [1, 0.99648713, 1, 1, 0.85275971, 0.92284385],
    "AB": [0.97401532, 0.99154727, 0.89344892, 0.99471187, 0.74359628, 0.92388866],
}
START = [0.09740153, 0.19915473, 0.02131022, -0.09947119, 0.19743851, 0.02283340]


def still(start=W):
    """A softmax regression whose local steps do not move it."""
    model = Softmax(start)
    model.optimizer = partial(torch.optim.SGD, lr=0.0)
    return model


@pytest.mark.parametrize("names", EXAMPLE)
def test_the_worked_example(tmp_path, names):
    trainer = fit(tmp_path, [OnAll()], names=names, sizes=[2 * len(names)], model=still())
    assert_printed(trainer.client.memories()[0]["fedala"]["weights"]["head.weight"], *EXAMPLE[names])
    if names == "AB":
        assert_printed(trainer.server.state["head.weight"], *START)  # W + (start - W), the change that is sent


def test_a_client_is_evaluated_where_its_next_visit_would_begin(tmp_path):
    trainer = fit(tmp_path, [OnAll()], names="AB", sizes=[4], max_rounds=0)
    assert_printed(trainer.personal_state(0)["head.weight"], *START)
    assert not trainer.client.memories().get(0)  # the evaluation stores nothing


def test_a_new_client_has_the_received_model(run):
    state, trainer = run([FedALA()], model=plain_sgd_model(), max_rounds=0)
    assert_same_bits(trainer.personal_state(0), state)


class Starts(Method):
    """Notes the parameters with which visits start, and the received ones."""

    def __init__(self, seen):
        self.note = seen.append

    def on_client_start(self, client):
        self.note((client.state(), clone(client.received)))


def test_equal_models_leave_the_weights_and_a_start_lies_between_different_ones(tmp_path):
    rate = 20.0  # steps that leave [0, 1]
    same = fit(tmp_path / "same", [OnAll(last=W, rate=rate)], "ABC", sizes=[6], model=still())
    assert same.client.memories()[0]["fedala"]["weights"]["head.weight"].eq(1).all()
    starts = []
    other = fit(tmp_path / "other", [OnAll(rate=rate), Starts(starts)], "ABC", sizes=[6], model=still())
    weights = other.client.memories()[0]["fedala"]["weights"]["head.weight"]
    assert weights.min() == 0 and weights.max() == 1
    start = starts[-1][0]["head.weight"]
    assert (start >= torch.minimum(V, W)).all() and (start <= torch.maximum(V, W)).all()


class Counting(Softmax):
    """Counts the passes over one batch, in which no step of the optimizer is taken."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def training_step(self, batch, batch_idx):
        self.seen()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("how", "passes"),
    [({}, 11), ({"window": 5}, 6), ({"known": True}, 1), ({"rate": 0}, 0)],
    ids=["ten passes and one that agree", "another window", "later visits", "without learning"],
)
def test_the_first_weights_take_passes_until_the_losses_agree(tmp_path, how, passes):
    """The losses of the example change by less than 0.1 from the first pass on."""
    seen = []
    fit(tmp_path, [OnAll(**{"known": False, **how})], model=Counting(lambda: seen.append(1)))
    steps = []
    fit(tmp_path, [], model=Counting(lambda: steps.append(1)))
    assert len(seen) - len(steps) == passes


def test_losses_that_never_agree_end_after_a_hundred_passes_with_a_warning(tmp_path):
    seen = []
    with warned("FedALA", "100"):
        fit(tmp_path, [OnAll(known=False, threshold=0.0)], model=Counting(lambda: seen.append(1)))
    assert 100 <= len(seen) < 110


def test_terms_of_other_methods_do_not_enter_the_weights(tmp_path):
    term = variant(Method, penalty=lambda self, client, step: 10 * client.live["head.weight"].square().sum())()

    plain, other = (fit(tmp_path / str(len(m)), m, model=still()) for m in ([OnAll()], [OnAll(), term]))
    weights = [trainer.client.memories()[0]["fedala"]["weights"]["head.weight"] for trainer in (plain, other)]
    assert torch.equal(*weights)


def test_the_other_layers_start_as_received_and_the_last_one_does_not(run):
    starts = []
    run([FedALA(rate=50.0), Starts(starts)], model=plain_sgd_model())
    moved = [{name for name, value in start.items() if not value.equal(received[name])} for start, received in starts]
    assert moved == 4 * [set()] + 4 * [{"classifier.weight", "classifier.bias"}]
