"""Methods whose server sees the updates of a cohort one by one: what they see, and the same bits however it trains."""

import pytest
import torch
from helpers.errors import refused
from helpers.runs import Stops, assert_same_bits, differs
from helpers.runs import train_in_turn as fit
from helpers.tiny import variant

from fl_lightning import Method, Weighted
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.methods import DPFedAvg, FedProx


class Same(Method):
    def transform_updates(self, server, updates):
        return updates


class Rewritten(Method):
    """The same rows, read and written."""

    def transform_updates(self, server, updates):
        return updates.replaced({name: updates.entry(name) for name in (*updates.names, *updates.float_buffers)})


Uniform = variant(Method, aggregate=lambda self, server, updates: updates.combined([1.0] * len(updates), mean=True))


class Median(Method):
    """A method that a user might write."""

    def aggregate(self, server, updates):
        return {name: updates.entry(name).median(0).values for name in updates.names}


class Doubles(Method):
    def transform_client_update(self, client, delta):
        return {name: 2 * value for name, value in delta.items()}


class Norms(Method):
    """Scales each change by the norm that its client has sent, and looks at what the server sees."""

    def on_client_end(self, client):
        return {"norm": Weighted.of(client.drift)}

    def transform_updates(self, server, updates):
        assert [*updates] == sorted(updates)
        for k, one in updates.items():
            assert one.id == k and one.num_steps > 0 and one.num_examples == one.weight and not one.received
            assert one.change.keys() <= server.state.keys() and one.buffers
        norms = torch.stack([one.payload["norm"].mean() for one in updates.values()])
        rows = torch.stack([torch.stack([v.square().sum() for v in one.change.values()]) for one in updates.values()])
        torch.testing.assert_close(rows.sum(1).sqrt(), norms)
        return updates.replaced(updates.combined(torch.diag(1 / norms)))


@pytest.mark.parametrize("methods", [[Same()], [Rewritten(), Same()]], ids=["untouched", "rewritten"])
def test_updates_that_stay_as_they_are_give_fedavgs_bits(tmp_path, methods):
    for others in ([], [Doubles()]):
        plain, trainer = fit(tmp_path, others)
        state, seen = fit(tmp_path, [*others, *methods])
        assert_same_bits(state, plain)
        assert seen.metrics["bytes/up"] == trainer.metrics["bytes/up"]
        assert seen.metrics["drift/global"] == trainer.metrics["drift/global"]


def test_an_aggregate_of_equal_weights_is_uniform_fedavg_wherever_other_transforms_stand(tmp_path):
    plain, doubled = (fit(tmp_path, methods, weighting="uniform")[0] for methods in ([], [Doubles()]))
    assert_same_bits(fit(tmp_path, [Uniform()])[0], plain)
    for methods in ([Doubles(), Uniform()], [Uniform(), Doubles()]):
        assert_same_bits(fit(tmp_path, methods)[0], doubled)


def test_an_update_has_what_its_client_sent_on_any_number_of_workers(tmp_path):
    one, two = (fit(tmp_path, [Norms(), Uniform()], devices=n)[0] for n in (1, 2))
    assert_same_bits(one, two)


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_skipped_client_is_not_among_the_updates(tmp_path):
    seen, states = [], []

    class Ids(Same):
        def transform_updates(self, server, updates):
            seen.append([*updates])
            return updates

    for devices, method in ((1, Ids()), (2, Same())):
        how = {"callbacks": [Stops(1, client=2)], "on_client_error": "skip", "devices": devices}
        states.append(fit(tmp_path, [method], **how)[0])
    assert seen == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    assert_same_bits(*states)
    assert_same_bits(states[0], fit(tmp_path, [], callbacks=[Stops(1, client=2)], on_client_error="skip")[0])


@pytest.mark.vectorized
def test_clients_that_train_side_by_side_are_seen_one_by_one(tmp_path):
    alone, beside = (fit(tmp_path, [Median(), FedProx(0.1)], clients_per_step=n)[0] for n in (1, 4))
    for name, value in alone.items():
        torch.testing.assert_close(beside[name], value, rtol=1e-4, atol=1e-5)
    assert differs(alone, fit(tmp_path, [FedProx(0.1)])[0])


def test_a_round_without_an_update_calls_no_hook(tmp_path):
    with pytest.warns(UserWarning, match="no update arrives"):
        fit(
            tmp_path,
            [returning(lambda updates: pytest.fail("called"))],
            systems=SystemsHeterogeneity(dropout_after=1.0),
            max_rounds=1,
        )


class Other(Median):
    name = "other"


def returning(value):
    return type("Returns", (Method,), {"aggregate": lambda self, server, updates: value(updates)})()


REFUSED = [
    ([Median(), Other()], ("method=['Median', 'Other']",)),
    ([DPFedAvg(noise=0), Median()], ("DPFedAvg", "'Median'")),
    ([Same(), DPFedAvg(noise=0)], ("DPFedAvg", "'Same'")),
]


@pytest.mark.parametrize(("methods", "words"), REFUSED)
def test_what_does_not_fit_together_is_refused_before_round_0(tmp_path, methods, words):
    with refused(*words):
        fit(tmp_path, methods, buffers="keep")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [lambda u: None, lambda u: {}, lambda u: {n: u.entry(n) for n in u.names}])
def test_a_result_of_another_form_is_refused(tmp_path, value):
    with refused("method=Returns", "aggregate"):
        fit(tmp_path, [returning(value)], max_rounds=1)
