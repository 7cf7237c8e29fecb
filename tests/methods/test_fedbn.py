"""FedBN keeps normalisation layers with the client."""

from helpers.errors import refused
from helpers.runs import assert_same_bits, differs, small_model

from fl_lightning.methods import FedBN
from fl_lightning.models import MLP, ImageClassifier


def test_fedbn_keeps_normalisation_with_the_client_and_averages_the_rest(run):
    state, trainer = run([FedBN()])
    own = [trainer.client.own_entries(k) for k in range(4)]
    layers = ("projector.layers.1", "projector.layers.4")
    assert all(name.startswith(layers) for name in own[0]) and len(own[0]) == 10
    assert differs(own[0], own[1])
    start = small_model().state_dict()
    assert_same_bits({n: state[n] for n in own[0]}, {n: start[n] for n in own[0]})
    assert differs({"w": state["classifier.weight"]}, {"w": start["classifier.weight"]})
    # four clients send the numbers of all other entries, each of four bytes or eight
    sent = sum(value.nbytes for name, value in state.items() if name not in own[0])
    assert trainer.metrics["bytes/up"] == trainer.metrics["bytes/down"] == 4 * sent


def test_fedbn_without_batchnorm_is_refused(run):
    with refused("FedBN", "model='ImageClassifier'", "BatchNorm"):
        run([FedBN()], model=ImageClassifier(MLP(64, [16])))
