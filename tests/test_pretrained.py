"""The page of pretrained models: its files, commands, and the numbers of its table."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits
from torchvision.models import ResNet18_Weights, resnet18

from fl_lightning import load_run
from fl_lightning.cli import main
from fl_lightning.data import Digits
from fl_lightning.methods import FedDecorr
from fl_lightning.models import MLP, Backbone, ImageClassifier, with_lora

# the encoder of a linear probe, of which a test below asserts it
pytestmark = pytest.mark.filterwarnings("ignore:.* are in evaluation mode:UserWarning")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "pretrained.md").read_text()
LINES = re.findall(r"^python cli\.py .*$", PAGE.replace("\\\n", " "), re.MULTILINE)
COMMANDS = [shlex.split(line)[2:] for line in LINES]
FEW = ["--trainer.max_rounds=1", "--data.train_size=100", "--data.test_size=50"]


def files():
    """The files of the page: each block has the name that is the last one before it."""
    for block in re.finditer(r"```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL):
        yield re.findall(r"`(\w+\.(?:py|yaml))`", PAGE[: block.start()])[-1], block[1]


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path, one_parser, undrawn):
    """Work in a folder with the page's files, and with the weights that its program writes."""
    for name, text in files():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_vit", "my_resnet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    runpy.run_path("pretrain.py")


def command(*texts):
    (found,) = (line for line in COMMANDS if all(any(text in word for word in line) for text in texts))
    return found


def fit(*words, root="runs"):
    main([*words, "--trainer.default_root_dir", root, "--trainer.name", "run"])
    run = load_run(f"{root}/run/version_0")
    return run.metrics, torch.load(run.run_dir / "checkpoints" / "model.ckpt", weights_only=True)["state_dict"]


ROWS = {
    "all weights, from random ones": COMMANDS[1],
    "all weights, pretrained": COMMANDS[0],
    "LoRA adapters of rank 4 and the classifier": command("lora.yaml"),
    "the classifier alone": command("probe.yaml"),
}


@pytest.mark.thorough
def test_the_table_has_the_accuracies_and_the_bytes_of_its_runs():
    stated = dict(re.findall(r"^\| ([^|]+) \| (\d+ % \| \d+ kB) \|$", PAGE, re.MULTILINE))
    assert stated.keys() == ROWS.keys()
    accuracies = {}
    for number, (row, words) in enumerate(ROWS.items()):
        metrics, _ = fit(*words, root=f"runs_{number}")
        accuracy, size = map(int, re.findall(r"\d+", stated[row]))
        accuracies[row] = 100 * metrics["test/accuracy"]
        assert accuracies[row] == pytest.approx(accuracy, abs=8), row
        assert metrics["bytes/up"] == pytest.approx(1000 * size, abs=500), row
    assert max(accuracies, key=accuracies.get) == "all weights, pretrained" and max(accuracies.values()) > 75


def test_a_linear_probe_trains_the_classifier_alone_and_feddecorr_changes_nothing():
    words = [*command("probe.yaml"), *FEW]
    # both within it: as an error, a warning of torch would also keep clients from training side by side
    with warned("method=FedDecorr", "representation"):
        _, plain = fit(*words, root="plain")
        _, decorrelated = fit(*words, "--method+=FedDecorr", root="decorrelated")
    weights = {name: value for name, value in torch.load("vit.pt").items() if "heads" not in name}
    encoder = {f"encoder.network.{name}": value for name, value in weights.items()}
    assert plain.keys() - encoder.keys() == {"classifier.weight", "classifier.bias"}
    assert_same_bits({name: plain[name] for name in encoder}, encoder)
    assert_same_bits(plain, decorrelated)


def test_adapters_of_a_vision_transformer_are_trained_and_its_weights_are_those_of_the_file():
    _, state = fit(*command("lora.yaml"), *FEW)
    factors = [name for name in state if "lora_B" in name]
    assert len(factors) == 6 and all(state[name].any() for name in factors)  # out_proj and two linear layers, twice
    kernel = "conv_proj.weight"
    assert torch.equal(state[f"encoder.network.{kernel}"], torch.load("vit.pt")[kernel])


@pytest.fixture
def resnet(tmp_path):
    """The pretrained weights, where torchvision looks for them before it fetches them."""
    place = tmp_path / "hub" / "checkpoints"
    place.mkdir(parents=True)
    network = resnet18()
    torch.save(network.state_dict(), place / ResNet18_Weights.DEFAULT.url.split("/")[-1])
    return network


@pytest.mark.thorough
def test_the_running_statistics_of_a_probe_stay_as_they_are(run):
    model = runpy.run_path("my_vit.py")["linear_probe"](ImageClassifier(Backbone(resnet18)))
    before = {name: value.clone() for name, value in model.encoder.state_dict().items()}
    with pytest.warns(UserWarning, match="evaluation mode"):
        run([], model=model, data=Digits(channels=3, image_size=32, train_size=100, test_size=50), max_rounds=1)
    assert_same_bits(model.encoder.state_dict(), before)


def test_a_penalty_on_a_frozen_encoder_is_warned_of_once(run):
    model = ImageClassifier(MLP(64, [16]))
    model.encoder.requires_grad_(False)
    with warned("method=FedDecorr", "representation", "changes nothing") as lines:
        run([FedDecorr(beta=0.1)], model=model, data=Digits(num_clients=2, train_size=100), max_rounds=1)
    assert len([line for line in lines if "method=FedDecorr" in str(line.message)]) == 1


@pytest.mark.thorough
def test_a_resnet_of_torchvision_begins_with_its_file_and_has_no_layer_for_with_lora(resnet):
    _, state = fit("fit", "--config", "resnet.yaml", *FEW, "--trainer.max_rounds=0")
    assert torch.equal(state["encoder.network.conv1.weight"], resnet.conv1.weight)
    with refused("with_lora.module"):
        with_lora(ImageClassifier(Backbone(resnet)))


@pytest.mark.thorough
def test_a_network_of_timm_begins_with_its_file():
    timm = pytest.importorskip("timm")
    network = timm.create_model("test_vit", img_size=32)
    torch.save(network.state_dict(), "timm.pt")
    _, state = fit(*command("timm.yaml"), *FEW, "--trainer.max_rounds=0")
    assert torch.equal(state["encoder.network.pos_embed"], network.pos_embed)


@pytest.mark.thorough
def test_peft_adapts_the_convolutions_of_a_resnet(resnet):
    pytest.importorskip("peft")
    _, state = fit(*command("my_resnet.adapted_resnet"), *FEW)
    factors = [name for name in state if "lora_B" in name]
    assert len(factors) == 17 and all(state[name].ndim == 4 for name in factors)
