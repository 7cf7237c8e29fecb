"""What holds of every callback that measures models: it changes nothing, and its figures show what it measured."""

import os
from functools import partial

import numpy as np
import pytest
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, history, small_data, small_model, small_trainer, watched
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.callbacks import (
    CCVR,
    BatchNormGap,
    BestCheckpoint,
    DeviationBound,
    Drift,
    Embedding,
    LayerAlignment,
    LayerSimilarity,
    LocalLosses,
    Measurement,
    NeuralCollapse,
    PerClassAccuracy,
    PersonalAccuracy,
    Scores,
    SpectrumMonitor,
)
from fl_lightning.callbacks.measurement import drawn_clients
from fl_lightning.methods import FedBN
from fl_lightning.models import MLP, ImageClassifier

fit = partial(watched, data=partial(small_data, train_size=200), participation=0.75, threads_per_worker=1, name="run")


def callbacks():
    spectra = SpectrumMonitor(local_models=True, local_every_n_rounds=2)
    similarity = LayerSimilarity(1, examples=100, max_clients=3)
    return [spectra, NeuralCollapse(), similarity, LayerAlignment(2), Embedding(examples=30, clients=[0, 2])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three rounds with all of the callbacks, by one worker. Its figures are small and empty.

    Drawing them takes most of the time, and has a test of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl_lightning.plotting.figures.laid_out", lambda drawings, title, columns: Figure((1, 1)))
        return fit(tmp_path_factory.mktemp("whole"), *callbacks(), logger=True)


def test_the_run_has_the_bits_of_one_without_them(whole, tmp_path):
    plain = fit(tmp_path)
    assert_same_bits(plain.server.state, whole.server.state)
    for row, without in zip(history(whole), history(plain), strict=True):
        assert {name: row[name] for name in without} == without


def names_of_figures():
    names = {f"spectrum/{prefix}{what}" for prefix in ("", "local_") for what in ("classifier", "representation")}
    names |= {f"similarity/{what}" for what in ("layers", "global", "clients")}
    names |= {"nc/rounds", "nc/cosines", "nc/norms"}
    return names | {"alignment/global", "alignment/local", "embedding/classes", "embedding/clients"}


def test_figures_are_in_the_folder_and_in_the_events(whole):
    drawn = {path.stem for path in (whole.run_dir / "figures").iterdir()}
    assert drawn == {name.replace("/", "_") for name in names_of_figures()}
    assert set(EventAccumulator(str(whole.run_dir)).Reload().Tags()["images"]) == names_of_figures()


@pytest.mark.thorough
def test_the_figures_of_all_callbacks_can_be_drawn(tmp_path):
    of_clients = [Drift(), DeviationBound(), PerClassAccuracy(), PersonalAccuracy(), LocalLosses()]
    trainer = fit(tmp_path, *callbacks(), *of_clients)
    sizes = {path.stem: path.stat().st_size for path in (trainer.run_dir / "figures").iterdir()}
    assert min(sizes.values()) > 5_000
    of_clients = {"drift_pairwise", "deviation_signs", "per_class_clients", "per_class_confusion", "personal_clients"}
    assert sizes.keys() >= of_clients | {name.replace("/", "_") for name in names_of_figures()} | {"local_losses_loss"}


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (LayerSimilarity(layers=["nothing"]), ("LayerSimilarity", "'nothing'", "trainer.taps")),
        (Embedding(tap="nothing"), ("Embedding", "'nothing'", "trainer.taps")),
        (LayerAlignment(layers=["classifier", "nothing"]), ("LayerAlignment.layers='nothing'", "classifier")),
        (Embedding(clients=[1, 9]), ("Embedding.clients=[9]", "0", "3")),
        (Embedding(classes=[3, 10]), ("Embedding.classes=[10]", "0", "9")),
        (LayerAlignment(layers=["encoder.layers.1.0", "classifier"]), ("'encoder.layers.1.0'", "32", "16")),
        (BatchNormGap(), ("BatchNormGap with the model='ImageClassifier'",)),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_written(tmp_path, callback, words):
    model = ImageClassifier(MLP(64, [8])) if isinstance(callback, BatchNormGap) else small_model()
    with refused(*words):
        fit(tmp_path, callback, model=model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("callback", "taps", "words"),
    [
        (NeuralCollapse(), {"representation": "encoder"}, ("NeuralCollapse", "width of the representation=24")),
        (SpectrumMonitor(), {"logits": "projector"}, ("SpectrumMonitor", "logits='projector'")),
        (Drift(), {"logits": "projector"}, ("Drift", "logits='projector'", "classifier=false")),
        (Embedding(classes=[*range(10)], examples=8), {}, ("Embedding.classes=",)),
    ],
)
def test_what_does_not_suffice_to_measure_is_refused_before_round_0(tmp_path, callback, taps, words):
    with refused(*words):
        fit(tmp_path, callback, taps=taps)
    assert not any(tmp_path.rglob("metrics.csv"))


@pytest.mark.parametrize("kind", [CCVR, BatchNormGap, Scores])
def test_without_one_global_model_they_are_refused_before_anything_is_written(tmp_path, kind):
    with refused(f"{kind.__name__} with entries that stay with the clients="):
        fit(tmp_path, kind(), methods=[FedBN()])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [LayerSimilarity, Embedding, NeuralCollapse, PerClassAccuracy, Scores])
def test_without_test_data_they_are_refused(tmp_path, kind):
    data = small_data()
    data.test_dataloader = list
    with refused(kind.__name__, "data='Digits'", "test_dataloader"):
        small_trainer(tmp_path, callbacks=[kind()]).fit(small_model(), data)


@pytest.mark.usefixtures("undrawn")
def test_a_callback_with_other_arguments_leaves_the_numbers_of_the_one_before(tmp_path):
    """It begins anew, under the name that the other's file had."""
    first = fit(tmp_path, Drift(1), LocalLosses(1), max_rounds=2)
    losses = (first.run_dir / LocalLosses.file).read_text()
    with warned("drift.1.npz"):
        again = fit(tmp_path, Drift(7), LocalLosses(7), ckpt_path="last", max_rounds=3)
    assert again.run_dir == first.run_dir
    rounds = {name: np.load(first.run_dir / name)["rounds"].tolist() for name in ("drift.npz", "drift.1.npz")}
    assert rounds == {"drift.npz": [2], "drift.1.npz": [0, 1]}
    assert (first.run_dir / "local_losses.1.csv").read_text() == losses


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", [Drift, LocalLosses])
@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: os.truncate(path, path.stat().st_size - 3)]
)
def test_a_damaged_file_begins_anew_with_a_warning(tmp_path, kind, damage):
    first = fit(tmp_path, kind(1), max_rounds=2)
    path = first.run_dir / kind.file
    damage(path)
    with warned(f"{path} is missing or damaged"):
        fit(tmp_path, kind(1), ckpt_path="last", max_rounds=3)
    rounds = np.load(path)["rounds"].tolist() if kind is Drift else np.loadtxt(path, delimiter=",", skiprows=1)[:, 0]
    assert set(rounds) == {2}


def test_two_callbacks_of_one_file_and_a_base_of_callbacks_are_refused(tmp_path):
    with refused("trainer.callbacks='Drift'", "drift.npz"):
        fit(tmp_path, Drift(1), Drift(2))
    with refused("trainer.callbacks='BestCheckpoint'", "best.ckpt"):
        fit(tmp_path, BestCheckpoint("test/loss"), BestCheckpoint("test/accuracy", "max"))
    with refused("trainer.callbacks='Measurement'"):
        fit(tmp_path, Measurement())


def test_of_many_clients_as_many_as_asked_are_drawn_and_others_in_another_round():
    assert drawn_clients([3, 1, 2], 3, 0, "x") == [1, 2, 3]
    draws = [drawn_clients(range(100), 5, 0, "x", r) for r in range(50)]
    assert all(len(set(one)) == 5 and one == sorted(one) for one in draws)
    assert len({k for one in draws for k in one}) > 70
    assert draws[0] == drawn_clients(range(100), 5, 0, "x", 0) != draws[1]
