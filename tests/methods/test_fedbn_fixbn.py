"""FedBN keeps normalisation layers with the client; FixBN freezes their statistics after a share of the rounds."""

from itertools import pairwise

import pytest
from helpers.runs import assert_same_bits, differs, plain_sgd_model, small_data, small_model

from fl_lightning.callbacks import Callback
from fl_lightning.methods import FedBN, FixBN


def test_fedbn_keeps_normalisation_with_the_client_and_averages_the_rest(run):
    state, trainer = run([FedBN()])
    own = [trainer.client.memories().own_entries(k) for k in range(4)]
    layers = ("projector.layers.1", "projector.layers.4")
    assert all(name.startswith(layers) for name in own[0]) and len(own[0]) == 10
    assert differs(own[0], own[1])
    start = small_model().state_dict()
    assert_same_bits({n: state[n] for n in own[0]}, {n: start[n] for n in own[0]})
    assert differs({"w": state["classifier.weight"]}, {"w": start["classifier.weight"]})
    # four clients send the numbers of all other entries, each of four bytes or eight
    sent = sum(value.nbytes for name, value in state.items() if name not in own[0])
    assert trainer.metrics["bytes/up"] == trainer.metrics["bytes/down"] == 4 * sent


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class States(Callback):
    """The global state after each round, its statistics and the rest."""

    def on_fit_start(self, trainer):
        self.statistics, self.others = [], []

    def on_round_end(self, trainer):
        state = {name: value.clone() for name, value in trainer.server.state.items()}
        self.statistics.append({name: value for name, value in state.items() if name.endswith(STATISTICS)})
        self.others.append({name: value for name, value in state.items() if not name.endswith(STATISTICS)})


def test_statistics_move_until_they_are_frozen_and_the_weights_go_on(run):
    states = States()
    run([FixBN(share=0.5)], max_rounds=4, callbacks=[states])
    statistics, others = states.statistics, states.others
    assert differs(statistics[0], statistics[1])
    assert_same_bits(statistics[1], statistics[2])
    assert_same_bits(statistics[1], statistics[3])
    for before, after in pairwise(others):
        assert all(differs({name: before[name]}, {name: after[name]}) for name in before)


def test_a_share_that_is_a_number_of_rounds_is_that_number(run):
    """Although 0.28 times 25 is above 7 in floating point."""
    states = States()
    run([FixBN(share=0.28)], max_rounds=25, local_steps=1, callbacks=[states])
    assert differs(states.statistics[5], states.statistics[6])
    assert_same_bits(states.statistics[6], states.statistics[7])


@pytest.mark.parametrize("frozen", [True, False])
def test_with_frozen_statistics_a_step_of_all_clients_is_one_on_the_pooled_data(run, frozen):
    """The paper's law; with the statistics of the batch it does not hold."""
    methods = [FixBN(share=0)] if frozen else []
    states = []
    for clients in (4, 1):
        data = small_data(num_clients=clients, batch_size=400)
        states.append(run(methods, model=plain_sgd_model(), data=data, max_rounds=1, local_epochs=1)[0])
    apart, pooled = ({n: v for n, v in state.items() if not n.endswith(STATISTICS)} for state in states)
    farthest = max(float((apart[name] - pooled[name]).abs().max()) for name in apart)
    assert (farthest < 1e-6) is frozen
