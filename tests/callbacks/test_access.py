"""What callbacks may ask of a trainer: it changes nothing, and any number of workers gives the same."""

import copy
from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, differs, history, plain_sgd_model, small_data, small_trainer, watched
from helpers.tiny import TinyData, TinyModule, clients, variant
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks import Callback
from fl_lightning.methods import SCAFFOLD, FedBN, FedLC
from fl_lightning.models import MLP, ImageClassifier

fit = partial(watched, model=plain_sgd_model, data=partial(small_data, train_size=200))


class Asks(Callback):
    """Asks for everything, in every hook in which it may."""

    requires = ("representation",)

    def on_client_end(self, trainer, client):
        trainer.evaluate("test", client.state())
        list(trainer.representations(client.state(), ("representation",), "train", client.info.id))
        trainer.fine_tune(client.info.id, client.state(), 2)
        assert trainer.gather(3) == [3]

    def on_round_end(self, trainer):
        trainer.evaluate("test")
        trainer.evaluate("test", client=1)
        list(trainer.representations(None, ("representation", "logits"), "test"))
        for k in trainer.client.memories() if trainer.client.kept else [0]:
            trainer.fine_tune(k, None, 1)
        assert trainer.gather(trainer.global_rank) == list(range(trainer.world_size))


@pytest.mark.parametrize("methods", [lambda: [SCAFFOLD(), FedLC()], lambda: [FedBN()]])
def test_whatever_is_asked_the_run_has_the_same_bits(tmp_path, methods):
    plain = fit(tmp_path, methods=methods(), threads_per_worker=1)
    asked = fit(tmp_path, Asks(), methods=methods(), threads_per_worker=1, devices=2)
    assert_same_bits(plain.server.state, asked.server.state)
    assert history(plain) == history(asked)


class Keeps(Callback):
    """Keeps what questions give at the end of the run, of all workers."""

    requires = ("representation",)

    def __init__(self, **questions):
        self.questions = questions

    def on_last_round_end(self, trainer):
        for name, ask in self.questions.items():
            answer = [part for parts in trainer.gather(ask(trainer)) for part in parts]
            setattr(self, name, sorted(answer, key=lambda part: part[0]))


def answers(tmp_path, methods=(), workers=(1, 2), **questions):
    found = [Keeps(**questions) for _ in workers]
    for number, keeps in zip(workers, found, strict=True):
        fit(tmp_path, keeps, methods=methods, devices=number, threads_per_worker=1, max_rounds=1)
    return found


def test_representations_and_fine_tuning_are_dealt_out_and_have_the_bits_of_one_worker(tmp_path):
    def batches(trainer, *which, **how):
        found = trainer.representations(None, ("representation",), *which, **how)
        return [(index, targets, taps["representation"]) for index, _, targets, taps in found]

    def tuned(trainer):
        return [(k, total(trainer.fine_tune(k, None, 2))) for k in range(trainer.global_rank, 4, trainer.world_size)]

    questions = {
        "test": lambda trainer: batches(trainer, "test"),
        "train": lambda trainer: batches(trainer, "train"),
        "probe": lambda trainer: batches(trainer, examples=100),
        "tuned": tuned,
    }
    one, two = answers(tmp_path, **questions)
    for name, owners, number in (("test", {None}, 360), ("train", {0, 1, 2, 3}, 200), ("probe", {None}, 100)):
        alone, dealt = getattr(one, name), getattr(two, name)
        assert [index for index, *_ in alone] == [index for index, *_ in dealt]
        assert {index.client for index, *_ in alone} == owners
        assert sum(len(targets) for _, targets, _ in alone) == number
        for first, second in zip(alone, dealt, strict=True):
            assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])
    assert [len(targets) for _, targets, _ in one.probe] == [64, 36]
    assert len(torch.cat([targets for _, targets, _ in one.probe]).unique()) == 10
    assert one.tuned == two.tuned
    assert len({value for _, value in one.tuned}) == 4


def total(state):
    return sum(float(value.double().sum()) for value in state.values())


def test_the_model_of_a_client_is_completed_by_what_stays_with_it(tmp_path):
    def refuses(trainer):
        owners = trainer.client.memories().owners
        theirs = [k for k, owner in owners.items() if owner != trainer.global_rank]
        for k in theirs[:1]:
            with refused(f"client={k}", "trainer.client.memories()"):
                trainer.fine_tune(k, None, 1)
        return [(len(theirs), 0)]

    questions = {
        "losses": lambda trainer: [(k, trainer.evaluate("test", client=k)["test/loss"]) for k in range(4)],
        "tuned": lambda trainer: [(k, total(trainer.fine_tune(k, None, 2))) for k in trainer.client.memories()],
        "refuses": refuses,
    }
    one, two = answers(tmp_path, [FedBN()], **questions)
    assert sorted([*one.losses, *one.losses]) == two.losses
    assert one.tuned == two.tuned
    assert len({*dict(one.losses).values()}) == len(one.tuned) == 4
    assert (one.refuses, two.refuses) == ([(0, 0)], [(2, 0), (2, 0)])


WithTestStep = variant(TinyModule, test_step=lambda self, batch, *_: self.log("loss", self.loss(batch)))


def test_a_probe_of_any_dataloader_is_picked_from_all_classes(tmp_path):
    data = TinyData()
    data.test_dataloader = lambda: DataLoader(TensorDataset(torch.rand(300, 8), torch.arange(300) // 100), 100)
    trainer = small_trainer(tmp_path, max_rounds=1, taps={"logits": "head"})
    trainer.fit(WithTestStep(), clients(data, 7, 7))
    ((*_, targets, _),) = trainer.representations(None, ("logits",), examples=48)
    assert len(targets) == 48 and set(targets.tolist()) == {0, 1, 2}


ZERO = torch.zeros(1)


def test_what_there_is_not_is_refused_by_name(tmp_path):
    trainer = fit(tmp_path, max_rounds=1)
    cases = {
        ("'nothing'", "trainer.taps"): lambda: list(trainer.representations(None, ("nothing",))),
        ("data='val'", "test", "train"): lambda: trainer.representations(None, ("logits",), "val"),
        ("examples=0", "1"): lambda: trainer.representations(None, ("logits",), examples=0),
        ("data='train'", "test"): lambda: trainer.representations(None, ("logits",), "train", examples=5),
        ("client=9", "0", "3"): lambda: trainer.representations(None, ("logits",), client=9),
        ("client=4", "0", "3"): lambda: trainer.evaluate("test", client=4),
        ("phase='val'", "test"): lambda: trainer.evaluate("val", client=1),
        ("phase='train'", "val", "test"): lambda: trainer.evaluate("train"),
        ("client=-1", "0", "3"): lambda: trainer.fine_tune(-1, None, 1),
        ("steps=-1", "0"): lambda: trainer.fine_tune(0, None, -1),
        ("state='nothing'", "classifier.bias"): lambda: trainer.evaluate("test", {"nothing": ZERO}),
        ("classifier.bias=(1,)", "(10,)"): lambda: trainer.evaluate("test", {"classifier.bias": ZERO}),
        ("domain='grey'",): lambda: trainer.representations(None, ("logits",), domain="grey"),
        ("trainer.log", "mine=", "number"): lambda: trainer.log("mine", "x"),
    }
    for words, ask in cases.items():
        with refused(*words):
            ask()


def test_evaluation_is_of_the_global_model_of_a_state_or_on_one_clients_data(tmp_path):
    data, found = small_data(train_size=200), {}

    class Watch(Callback):
        def on_round_end(self, trainer):
            zeros = {name: torch.zeros_like(value) for name, value in trainer.server.state.items()}
            found.update(whole=trainer.evaluate("test"), zeros=trainer.evaluate("test", zeros))
            found.update(own=trainer.evaluate("test", client=2), none=trainer.evaluate("val"))

    model = plain_sgd_model()
    trainer = small_trainer(tmp_path, callbacks=[Watch()], max_rounds=1)
    trainer.fit(model, data)
    assert found["whole"] == {tag: trainer.metrics[tag] for tag in found["whole"]}
    assert found["zeros"]["test/loss"] == pytest.approx(torch.tensor(10.0).log().item())
    assert found["none"] == {}
    model.eval()
    loader = data.test_dataloader(2)
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    assert found["own"]["test/accuracy"] == pytest.approx(right / len(loader.rows))


def test_fine_tuning_is_plain_steps_of_the_modules_own_loss(tmp_path):
    """A method that would change the loss or the gradients has no part in it."""
    found = {}

    class Watch(Callback):
        def on_round_end(self, trainer):
            found["start"] = copy.deepcopy(trainer.server.state)
            found["tuned"] = [trainer.fine_tune(1, None, steps) for steps in (0, 3, 3)]

    model = plain_sgd_model()
    trainer = fit(tmp_path, Watch(), methods=[SCAFFOLD(), FedLC()], model=model, max_rounds=1)
    none, tuned, again = found["tuned"]
    assert_same_bits(none, found["start"])
    assert_same_bits(tuned, again)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    with trainer.run.loaders.train(1, 0, "fine_tune") as loader:
        batches = [batch for _ in range(3) for _, batch in loader.batches()][:3]
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same_bits(tuned, dict(model.state_dict()))
    assert differs(tuned, found["start"])


def test_should_stop_on_any_worker_ends_the_run_after_the_round(tmp_path):
    class Stops(Callback):
        def on_client_end(self, trainer, client):
            if trainer.global_rank == trainer.world_size - 1 and trainer.server.round == 1:
                trainer.should_stop = True

    trainer = fit(tmp_path, Stops(), max_rounds=5, devices=2)
    assert [row["round"] for row in trainer.history] == [0, 1]


def test_a_callback_that_writes_to_a_large_module_does_not_change_the_update(tmp_path):
    class Overwrites(Callback):
        def on_client_end(self, trainer, client):
            with torch.no_grad():
                for name in client.trainable:
                    client.live[name].zero_()

    def fitted(name, callbacks):
        torch.manual_seed(0)
        model = ImageClassifier(MLP(64, [1200]), optimizer=partial(torch.optim.SGD, lr=0.01))
        trainer = fit(tmp_path / name, *callbacks, methods=[SCAFFOLD()], model=model)
        assert trainer.client.has_large_model
        return trainer.server.state

    assert_same_bits(fitted("alone", []), fitted("watched", [Overwrites()]))


def test_a_misspelt_attribute_of_the_trainer_is_refused(tmp_path):
    class Stops(Callback):
        def on_round_end(self, trainer):
            trainer.shuold_stop = True

    with pytest.raises(AttributeError, match=r"trainer\.shuold_stop"):
        fit(tmp_path, Stops(), max_rounds=1)


def test_hooks_that_would_not_be_called_are_refused(tmp_path):
    class Renamed(Callback):
        def on_round_end(self, t):
            pass

    class Lightnings(Callback):
        def on_train_epoch_end(self, trainer):
            pass

    cases = {
        Renamed(): ("Renamed.on_round_end(t)", "trainer"),
        Lightnings(): ("Lightnings.on_train_epoch_end", "on_round_end"),
        object(): ("trainer.callbacks='object'", "callbacks.Callback"),
    }
    for callback, words in cases.items():
        with refused(*words):
            small_trainer(tmp_path, callbacks=[callback])


def test_before_a_run_a_trainer_says_that_it_has_none(tmp_path):
    trainer = small_trainer(tmp_path)
    assert (trainer.metrics, trainer.history, trainer.run_dir) == ({}, [], None)
    with refused("fit", "validate", "test", kind=RuntimeError):
        _ = trainer.server
