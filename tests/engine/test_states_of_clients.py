"""Methods that give each client a state of its own: what clients receive, and the same bits however they train."""

import pytest
import torch
from helpers.errors import refused
from helpers.lora import lora_model
from helpers.methods import METHODS, NAMES, Chosen, Shifted
from helpers.runs import Stops, assert_same_bits, differs, history, plain_sgd_model, small_data, small_trainer
from helpers.runs import train_in_turn as fit
from helpers.tiers import sample
from helpers.tiny import variant

from fl_lightning import Method
from fl_lightning.callbacks import Callback, PersonalAccuracy
from fl_lightning.methods import DPFedAvg, FedBN, FedProx
from fl_lightning.utilities.errors import SharedStateError


class Global(Method):
    """Sends the global entries again, by both hooks."""

    has_personal_models = False

    def sent_state(self, server, k):
        return {} if k == 1 else {name: server.state[name] for name in NAMES}

    def start_state(self, client):
        return {name: value.double() for name, value in client.received.items() if name in NAMES}


class Received(Callback):
    """Keeps what each client of the last round received, and its change."""

    def __init__(self):
        self.states, self.changes = {}, {}

    def on_client_end(self, trainer, client):
        k = client.info.id
        self.states[k] = {name: value.clone() for name, value in client.received.items()}
        self.changes[k] = {name: value.clone() for name, value in client.change.items()}
        after = client.state()
        for name, change in self.changes[k].items():
            assert torch.equal(after[name].double() - self.states[k][name].double(), change)


def test_the_global_entries_give_fedavgs_bits_and_bytes(tmp_path):
    plain, trainer = fit(tmp_path, [])
    state, same = fit(tmp_path, [Global()])
    assert_same_bits(state, plain)
    assert history(same) == history(trainer)


def test_a_change_is_measured_from_what_the_client_received(tmp_path):
    received, states = Received(), {}

    class Sums(Shifted):
        def transform_updates(self, server, updates):
            for k, update in updates.items():
                assert [*update.received] == [*NAMES]
                states[k] = {name: update.change[name] for name in NAMES}
            return updates

    state, _ = fit(tmp_path, [Sums()], max_rounds=1, callbacks=[received], weighting="uniform")
    start, _ = fit(tmp_path, [], max_rounds=0)
    for name in NAMES:
        for k in range(4):
            torch.testing.assert_close(received.states[k][name], start[name] + k / 100)
            assert torch.equal(states[k][name], received.changes[k][name])
        mean = torch.stack([received.changes[k][name] for k in range(4)]).mean(0)
        torch.testing.assert_close(state[name].double(), start[name] + mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", [Shifted, Chosen])
def test_the_first_step_has_no_pull_of_fedprox_beside_it(tmp_path, method):
    one = {"local_steps": 1, "max_rounds": 1}
    plain, _ = fit(tmp_path, [method()], **one)
    assert_same_bits(fit(tmp_path, [method(), FedProx(100.0)], **one)[0], plain)
    assert differs(plain, fit(tmp_path, [], **one)[0])
    two = {"local_steps": 2, "max_rounds": 1}
    assert differs(fit(tmp_path, [method()], **two)[0], fit(tmp_path, [method(), FedProx(1.0)], **two)[0])


LISTS = "Shifted, FedProx", "Shifted, SCAFFOLD, MOON", "FedBN, Shifted", "IFCA", "FedAMP, FedProx", "HetLoRA"


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("name", sample(["Chosen, FedProx", *LISTS], "Chosen, FedProx"))
def test_a_failed_client_is_skipped_on_any_number_of_workers(tmp_path, name):
    how = {"callbacks": [Stops(1, client=2)], "on_client_error": "skip"}
    how |= {"model": lora_model} if name == "HetLoRA" else {}
    one, two = (fit(tmp_path, METHODS[name](), devices=n, **how)[0] for n in (1, 2))
    assert_same_bits(one, two)


@pytest.mark.vectorized
def test_extras_cannot_be_read_in_a_step_of_clients_side_by_side(tmp_path):
    class Reads(Shifted):
        def penalty(self, client, step):
            return client.extras(self)["shift"]["number"] * step.taps["logits"].square().mean()

        requires = ("logits",)

    with refused("trainer.clients_per_step=4", "client.extras"):
        fit(tmp_path, [Reads()], clients_per_step=4)
    fit(tmp_path, [Reads()], max_rounds=1)


def test_a_clients_model_is_the_one_that_its_next_visit_would_begin_with(tmp_path):
    class Looks(Callback):
        def on_last_round_end(self, trainer):
            for k in range(4):
                own = trainer.personal_state(k)
                for name in NAMES:
                    torch.testing.assert_close(own[name], trainer.server.state[name] + k / 100)
                metrics = trainer.evaluate("test", own, client=k)
                assert trainer.evaluate("test", client=k) == metrics
                assert not differs(trainer.fine_tune(k, None, 2), trainer.fine_tune(k, own, 2))
            assert trainer.evaluate("test") == trainer.evaluate("test", dict(trainer.server.state))

    fit(tmp_path, [Shifted()], callbacks=[Looks()], cohort_size=2, max_rounds=1)


def test_extras_count_with_their_size_and_replaced_entries_once(tmp_path):
    down = {}
    for name, methods in {"plain": [], "shifted": [Shifted()], "chosen": [Chosen()]}.items():
        _, trainer = fit(tmp_path, methods, cohort_size=3)
        down[name] = [row["bytes/down"] for row in trainer.history]
    # a number and a tensor of one number, in the type of the parameters, for each client of the cohort
    assert [more - less for more, less in zip(down["shifted"], down["plain"], strict=True)] == [24, 24, 24]
    # and the signs of the clients so far, which travel to all of them
    assert down["chosen"][0] == down["shifted"][0]
    assert (down["chosen"][1] - down["shifted"][1]) == 3 * 3 * 4


def test_numbers_that_do_not_travel_are_not_counted(tmp_path):
    part = variant(Shifted, sent_numbers=lambda self, k: {"classifier.bias": k})()

    rows = [fit(tmp_path, [method], max_rounds=1)[1].metrics for method in (Shifted(), part)]
    unsent = sum(4 * (10 - k) for k in range(4))
    for tag in ("bytes/down", "bytes/up"):
        assert rows[0][tag] - rows[1][tag] == unsent


@pytest.mark.parametrize("place", ["received", "extras"])
def test_what_a_client_received_is_for_reading(tmp_path, place):
    class Writes(Shifted):
        def on_client_start(self, client):
            tensor = client.received[NAMES[0]] if place == "received" else client.extras(self)["shift"]["tensor"]
            tensor.zero_()

    with refused("method=Writes", f"client.{place}", kind=SharedStateError):
        fit(tmp_path, [Writes()])


def test_what_a_hook_keeps_on_itself_is_undone_before_the_next_client(tmp_path):
    class Counts(Shifted):
        count, extra = 0, None

        def sent_state(self, server, k):
            assert not self.count
            self.count += 1
            return super().sent_state(server, k)

        def sent_extras(self, server, k):
            assert self.extra is None
            self.extra = k
            return super().sent_extras(server, k)

        def on_client_start(self, client):
            client.extras(self)["shift"]["more"] = 1

    plain, counted = (fit(tmp_path, [method()], max_rounds=1)[0] for method in (Shifted, Counts))
    assert_same_bits(plain, counted)


def returning(hook, value):
    return type("Returns", (Method,), {hook: lambda self, *args: value})()


def again(base):
    return type(f"{base.__name__}Again", (base,), {"name": "again", "has_personal_models": False})()


BIAS = torch.zeros(10)
REFUSED = {
    "two methods with models": (lambda: [Shifted(), Chosen()], "method=['Shifted', 'Chosen']"),
    "one entry, by the server": (lambda: [Shifted(), again(Shifted)], "method=['Shifted', 'ShiftedAgain']"),
    "one entry, by the client": (lambda: [Shifted(), again(Chosen)], "method=['Shifted', 'ChosenAgain']"),
    "DPFedAvg, sent_state": (lambda: [returning("sent_state", None), DPFedAvg(noise=0)], "sent_state"),
    "DPFedAvg, sent_extras": (lambda: [returning("sent_extras", None), DPFedAvg(noise=0)], "sent_extras"),
    "DPFedAvg, start_state": (lambda: [returning("start_state", None), DPFedAvg(noise=0)], "start_state"),
    "an unknown entry": (lambda: [returning("sent_state", {"nothing": BIAS})], "sent_state='nothing'"),
    "another shape": (lambda: [returning("start_state", {"classifier.bias": BIAS[1:]})], "start_state"),
    "no tensor": (lambda: [returning("sent_state", {"classifier.bias": 1.0})], "sent_state"),
    "no state": (lambda: [returning("start_state", 1)], "start_state"),
    "extras": (lambda: [returning("sent_extras", {"a": "text"})], "sent_extras"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path, name):
    methods, words = REFUSED[name]
    with refused(words):
        fit(tmp_path, methods(), buffers="keep" if "DPFedAvg" in name else "average", max_rounds=1)


@pytest.mark.parametrize("hook", ["sent_state", "start_state"])
def test_entries_that_do_not_travel_are_refused(tmp_path, hook):
    kept = returning(hook, {"projector.layers.1.weight": torch.zeros(32)})
    with refused(f"method=Returns: {hook}"):
        fit(tmp_path, [kept, FedBN()], max_rounds=1)
    model = lora_model()
    frozen = next(name for name, value in model.named_parameters() if not value.requires_grad)
    value = model.state_dict()[frozen]
    with refused(f"method=Returns: {hook}", frozen):
        fit(tmp_path, [returning(hook, {frozen: value})], model=lora_model, max_rounds=1)


@pytest.mark.parametrize("name", ["IFCA", "FedAMP, FedProx"])
def test_the_command_test_evaluates_what_the_next_visits_would_begin_with(tmp_path, name):
    how = {"callbacks": [PersonalAccuracy(fine_tune_steps=0)], "cohort_size": 3}
    _, trainer = fit(tmp_path, METHODS[name](), max_rounds=1, **how)
    again = small_trainer(tmp_path, callbacks=[PersonalAccuracy(fine_tune_steps=0)])
    path = trainer.run_dir / "checkpoints" / "last.ckpt"
    data = small_data(train_size=120, test_size=50, num_clients=4)
    metrics = again.test(plain_sgd_model(), data, path, method=METHODS[name]())
    assert metrics["personal/accuracy"] == trainer.metrics["personal/accuracy"]
