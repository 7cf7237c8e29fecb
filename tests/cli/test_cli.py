"""The command line: composition, one-line errors, start-up."""

import hashlib
import json
import re
import shlex
import warnings

import pytest
import torch
import yaml
from helpers import tiny  # noqa: F401, named in a test
from helpers.errors import assert_names, warned

from fl_lightning.cli import main
from fl_lightning.cli.cli import plain_warnings
from fl_lightning.cli.entry_point import program
from fl_lightning.cli.parser_errors import about_class
from fl_lightning.models import ImageClassifier, Logistic
from fl_lightning.utilities.errors import ClientError

FIT = ["fit", "--config", "experiments/smoke/fedavg.yaml"]
QUICK = ["--trainer.max_rounds=1", "--trainer.callbacks=null", "--data.train_size=200", "--data.test_size=50"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch, request, one_parser, undrawn):
    monkeypatch.chdir(request.config.rootpath)


RAN = []


@pytest.fixture
def ran(tmp_path_factory, capsys):
    """The folder of a quick run, which tests read; it is made once."""
    if not RAN:
        root = tmp_path_factory.mktemp("ran")
        main([*FIT, *QUICK, f"--trainer.default_root_dir={root}"])
        RAN.append(root / "fedavg" / "version_0")
    capsys.readouterr()
    return RAN[0]


@pytest.mark.parametrize("command", ["test", "predict", "partition", "doctor"])
def test_the_config_of_a_run_serves_every_command(ran, recwarn, command, tmp_path):
    where = ["--config", str(ran / "config.yaml"), "--trainer.default_root_dir", str(tmp_path)]
    main([command, *where, "--weights", str(ran / "checkpoints" / "model.ckpt"), "--allow_changes", "true"])
    said = "\n".join(str(warning.message) for warning in recwarn)
    assert ("allow_changes=True" in said) == (command != "doctor")
    assert ("weights=" in said) == (command == "partition")


def printed(capsys, *args):
    with pytest.raises(SystemExit, match="0"):
        main([*args, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def refused(capsys, *args):
    """The one line with which bad input ends."""
    with pytest.raises(SystemExit, match="2"):
        main(list(args))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_a_list_of_classes_replaces_that_of_an_earlier_file(capsys, tmp_path):
    """The parser alone merges lists of the same length item by item: MOON would get the mu of FedProx."""
    (tmp_path / "prox.yaml").write_text("method: [{class_path: FedProx, init_args: {mu: 0.123}}]")
    (tmp_path / "moon.yaml").write_text("method: [{class_path: MOON}]")
    files = [f"--config={tmp_path / name}.yaml" for name in ("prox", "moon")]
    (method,) = printed(capsys, *FIT, *files)["method"]
    assert method["class_path"].endswith("MOON")
    assert method["init_args"]["mu"] == 1.0


def test_methods_are_appended_on_the_command_line_and_by_fragments(capsys):
    fragments = [f"experiments/methods/{name}.yaml" for name in ("feduv", "feddecorr")]
    args = [arg for path in fragments for arg in ("--config", path)]
    found = printed(capsys, *FIT, *args, "--method+=FedProx", "--method.mu", "0.5")["method"]
    assert [entry["class_path"].rsplit(".", 1)[1] for entry in found] == ["FedUV", "FedDecorr", "FedProx"]
    assert found[2]["init_args"]["mu"] == 0.5


def test_a_list_of_methods_that_stands_twice_is_refused(capsys):
    """The parser alone would train the last one, and say nothing."""
    line = refused(capsys, *FIT, "--method", "FedProx", "--method.mu", "0.5", "--method", "MOON")
    assert_names(line, "--method=", "FedProx", "MOON", "--method+=")


def test_all_arguments_that_are_out_of_range_are_told_a_line_each(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*FIT, "--trainer.max_rounds=-1", "--trainer.local_epochs=0"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip() for line in lines] == ["trainer.max_rounds=-1", "trainer.local_epochs=0"]


def test_a_test_of_a_checkpoint_has_the_config_of_its_run_and_tells_what_overrides_it(capsys, recwarn, tmp_path):
    main([*FIT, *QUICK, f"--trainer.default_root_dir={tmp_path}", "--method=FedProx"])
    run = tmp_path / "fedprox" / "version_0"
    (accuracy,) = re.findall(r"1 round, (test/accuracy \d+\.\d\d %), test/loss", capsys.readouterr().out)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["data"]["init_args"]["train_size"] == 200
    assert saved["method"][0]["init_args"] == {"mu": 0.01}  # a list, although one method was given
    given, config = ["test", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"], f"--config={run / 'config.yaml'}"
    for words in (given, [*given, config], ["test", config, "--ckpt_path=last"]):
        main(words)
        assert accuracy in capsys.readouterr().out
    assert not [warning for warning in recwarn if "ckpt_path=" in str(warning.message)]
    with warned("ckpt_path=", "seed_everything=3", "0", "plan_hash=", "method.FedProx.mu=0.5", "0.01"):
        main([*given, "--seed_everything=3", "--method.mu=0.5"])


def test_the_model_file_serves_lightning_and_predict_writes_its_outputs(capsys, ran):
    model, path = ran / "checkpoints" / "model.ckpt", ran / "predictions.pt"
    loaded = ImageClassifier.load_from_checkpoint(model)
    last = torch.load(ran / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, last[name]) for name, value in loaded.state_dict().items())
    given = torch.load(model, weights_only=True)["hyper_parameters"]
    assert given["_class_path"] == "fl_lightning.models.ImageClassifier"
    assert given["encoder"]["init_args"]
    config = ["--config", str(ran / "config.yaml"), "--ckpt_path", "last"]
    main(["predict", *config])
    assert f"predictions in {path}" in capsys.readouterr().out
    outputs = torch.load(path, weights_only=True)
    assert sum(map(len, outputs)) == 50


def test_given_weights_are_in_the_config_and_their_digest_in_the_record(tmp_path, ran):
    weights = ran / "checkpoints" / "model.ckpt"
    main([*FIT, *QUICK, f"--trainer.default_root_dir={tmp_path}", f"--weights={weights}"])
    second = tmp_path / "fedavg" / "version_0"
    assert yaml.safe_load((second / "config.yaml").read_text())["weights"] == str(weights)
    record = json.loads((second / "environment.json").read_text())["weights"]
    assert record == {"path": str(weights), "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}


def test_the_saved_config_runs_again_to_the_same_bits(tmp_path, ran):
    main(["fit", "--config", str(ran / "config.yaml"), "--trainer.default_root_dir", str(tmp_path)])
    first, second = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in (ran, tmp_path / "fedavg" / "version_0")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


BAD = {
    "another choice": (["--method+=Freeze", "--method.mode=ice"], ("Freeze.mode='ice'", "frozen")),
    "no texts": (["--data=ImageFolderImages", "--data.classes=[no, yes]"], ("ImageFolderImages.classes", "quote")),
    "an abstract class": (["--data=ImageDataModule"], ("'ImageDataModule'", "abstract")),
    "no key": (["3"], ("3", "--KEY")),
    "a config without its key": (["a.yaml"], ("a.yaml", "--config a.yaml")),
    "a required argument": (["--trainer.callbacks+=EarlyStopping"], ("EarlyStopping.monitor",)),
    "no data": (["--data=NpyImages", "--data.root=nowhere"], ("data.root='nowhere'",)),
    "no checkpoint": (["--ckpt_path=README.md"], ("ckpt_path='README.md'",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_the_key_before_anything_is_written(capsys, tmp_path, case):
    args, words = BAD[case]
    assert_names(refused(capsys, *FIT, f"--trainer.default_root_dir={tmp_path}", *args), *words)
    assert not list(tmp_path.iterdir())


def test_a_command_without_data_is_refused(capsys):
    assert_names(refused(capsys, "fit", "--config=experiments/models/feduvcnn.yaml"), "data:")


def test_help_lists_our_networks_and_not_all_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    text = capsys.readouterr().out
    assert "ImageClassifier" in text
    assert not re.search(r"ResNet\b|torchvision", text)  # other packages' networks
    assert "_SaveConfig" not in text


def test_the_help_of_a_class_lists_the_classes_of_the_package_alone(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--model.help", "ImageClassifier"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 100 and any("fl_lightning.models.Backbone" in line for line in lines)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--model.help=Backbone", ["model.help='Backbone'", "--model.encoder.help=Backbone"]),
        ("--model.help=fl_lightning.models.Backbone", ["model.help=", "--model.encoder.help=Backbone"]),
        ("--data=Dirichlet", ["data='Dirichlet'", "--data.partitioner=Dirichlet"]),
        ("--method.help=FedPrx", ["method.help='FedPrx'", "FedProx"]),
    ],
)
def test_a_class_of_another_key_is_answered_with_the_option_of_that_key(capsys, option, named):
    assert_names(refused(capsys, "fit", option), *named)


def test_a_function_that_does_not_say_what_it_builds_is_answered_with_its_first_line():
    """Newer versions of jsonargparse refuse it."""
    said = about_class(
        "model.encoder.network", "helpers.tiny.clients", "Expected '' to be a subclass of <class 'Module'>"
    )
    assert_names(said, "model.encoder.network='helpers.tiny.clients'", "def clients", "-> Module")


def test_a_checkpoint_neither_imports_nor_configures_anything(monkeypatch, capsys, tmp_path):
    """Lightning's own command line would take the class and the arguments of the model from the file."""
    (tmp_path / "of_a_stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    model, file = ImageClassifier(Logistic()), tmp_path / "given.ckpt"
    hostile = {"_class_path": "of_a_stranger.Net", "num_classes": 3, "encoder": {"class_path": "of_a_stranger.Net"}}
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": hostile}, file)
    given = [*FIT[1:], *QUICK, f"--trainer.default_root_dir={tmp_path}", "--model.encoder=Logistic"]
    given += ["--model.projector=null", "--data.image_size=null"]
    main(["test", *given, f"--ckpt_path={file}"])
    assert "test/accuracy" in capsys.readouterr().out
    assert_names(refused(capsys, "fit", *given, f"--ckpt_path={file}"), "ckpt_path=", "--weights")
    main(["fit", *given, f"--weights={file}"])
    config = yaml.safe_load((tmp_path / "fedavg/version_0/config.yaml").read_text())
    assert config["model"]["init_args"]["num_classes"] == 10


@pytest.mark.parametrize(
    ("given", "options"), [("null", None), ("{weights: null, sizes: [null, 1]}", {"weights": None, "sizes": [None, 1]})]
)
def test_null_on_the_command_line_is_null_in_a_part_of_the_model(capsys, given, options):
    network = ["--model.encoder=Backbone", "--model.encoder.network=torchvision.models.resnet18"]
    config = printed(capsys, *FIT, *network, f"--model.encoder.options={given}", "--model.encoder.head=null")
    encoder = config["model"]["init_args"]["encoder"]["init_args"]
    assert (encoder["options"], encoder["head"]) == (options, None)
    config = printed(capsys, *FIT, *network, "--model.encoder.head=a, None")
    assert config["model"]["init_args"]["encoder"]["init_args"]["head"] == "a, None"


def test_an_argument_that_no_object_keeps_is_known_from_the_config(capsys, tmp_path, monkeypatch):
    (tmp_path / "sealed.py").write_text(
        "from fl_lightning import Method\n\n\nclass Sealed(Method):\n"
        "    def __init__(self, temperature: float = 1.0):\n        self._hidden = (temperature,)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    where = ["--trainer.default_root_dir", str(tmp_path), "--trainer.name", "run", "--trainer.logger", "false"]
    fit = [*FIT, *QUICK, *where, "--method", "sealed.Sealed", "--method.temperature"]
    main([*fit, "0.5"])
    line = refused(capsys, *fit, "0.7", "--ckpt_path", "last")
    assert_names(line, "method.0.init_args.temperature=0.7", "0.5", "--allow_changes true")
    with warned("trainer.max_rounds=1"):
        main([*fit, "0.5", "--ckpt_path", "last"])


def test_a_config_is_that_of_the_run_as_it_goes_on_and_a_changed_run_has_one_of_its_own(capsys, tmp_path):
    where = ["--trainer.default_root_dir", str(tmp_path), "--trainer.name", "run", "--trainer.logger", "false"]
    fit = ["fit", "--config", "experiments/smoke/scaffold.yaml", *QUICK]
    main([*fit, *where])
    first = tmp_path / "run" / "version_0" / "config.yaml"
    before = yaml.safe_load(first.read_text())
    main([*fit, *where, "--trainer.max_rounds", "2", "--ckpt_path", "last"])
    before["trainer"]["max_rounds"] = 2
    assert yaml.safe_load(first.read_text()) == before
    changed = [*fit, *where, "--trainer.max_rounds", "2", "--data.batch_size", "8", "--ckpt_path", "last"]
    line = refused(capsys, *changed)
    assert_names(line, "data.batch_size=8", "32", "--allow_changes true")
    assert len(line) < 300
    main([*changed, "--allow_changes", "true"])
    second = tmp_path / "run" / "version_1"
    config, changes = (yaml.safe_load((second / name).read_text()) for name in ("config.yaml", "changes.yaml"))
    assert (config["data"]["init_args"]["batch_size"], config["allow_changes"]) == (8, True)
    assert config["ckpt_path"] == changes[0]["ckpt_path"] == str(first.parent / "checkpoints/last.ckpt")
    assert changes[0]["changes"] == {"data.batch_size": {"before": 32, "now": 8}}
    assert yaml.safe_load(first.read_text()) == before
    with warned("ckpt_path=", "data.batch_size=8", "32"):
        main(["test", "--config", str(second / "config.yaml"), "--ckpt_path", config["ckpt_path"]])


def command_of(line):
    """What follows the program in a line, whose beginning is that of these tests."""
    return shlex.split(line)[len(shlex.split(program())) :]


def test_the_line_of_a_failure_has_the_command_that_repeats_the_visit(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main([*FIT, *QUICK, "--trainer.default_root_dir", str(tmp_path / "a b; c"), "--model.optimizer.lr", "1e30"])
    line = next(one for one in capsys.readouterr().err.splitlines() if one.startswith("error: "))
    failure, command = line.split("; repeat it: ")
    assert failure.startswith("error: client 0, round 0: ")
    with pytest.raises(SystemExit, match="1"):
        main(words := command_of(command))
    assert capsys.readouterr().err.splitlines()[-1] == failure
    assert_names(refused(capsys, *words, "--client", "1"), "client=1")


def test_a_visit_that_succeeds_is_one_line(capsys, ran):
    visit = ["--ckpt_path=last", "--round=1", "--client=2"]
    main(["replay", f"--config={ran}/config.yaml", "--trainer.max_rounds=2", *visit])
    line = r"client 2, round 1: \d+ local steps, lr 0.05, train/loss [\d.]+, train/accuracy [\d.]+\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_an_exception_in_a_visit_is_the_last_one_of_its_replay(capsys, tmp_path):
    with pytest.raises(ClientError):
        main([*FIT, *QUICK, "--trainer.default_root_dir", str(tmp_path), "--model=helpers.theirs.Mistaken"])
    failure, command = capsys.readouterr().err.splitlines()[-1].split("; repeat it: ")
    with pytest.raises(LookupError, match="their own mistake") as caught:
        main(command_of(command))
    assert caught.traceback[-1].name == "training_step"  # where a debugger stops
    place = r"LookupError at theirs.py:\d+ \(training_step\): their own mistake"
    assert re.fullmatch(rf"error: client 0, round 0: {place}", failure)
    # Python 3.10 has no notes
    assert re.fullmatch(rf"error: {place}(; client 0, round 0)?", capsys.readouterr().err.splitlines()[-1])


def test_a_mistake_in_the_first_step_is_one_line_with_its_place_before_anything_is_written(capsys, tmp_path):
    line = refused(capsys, *FIT, "--trainer.default_root_dir", str(tmp_path), "--model=helpers.theirs.Misspelt")
    assert re.search(r"model=Misspelt: training_step fails .*AttributeError at theirs.py:\d+ \(training_step\)", line)
    assert "Traceback" not in line and len(line) < 300
    assert not list(tmp_path.iterdir())


def test_an_exception_of_a_constructor_comes_without_the_errors_of_the_parser(capsys):
    with pytest.raises(LookupError, match="their own mistake") as caught:
        main([*FIT, "--model=helpers.theirs.Unbuilt"])
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    place = r"error: LookupError at theirs.py:\d+ \(__init__\): their own mistake"
    assert re.fullmatch(place, capsys.readouterr().err.splitlines()[-1])


def test_a_warning_is_one_line_and_printed_once():
    with plain_warnings():
        lines = [warnings.formatwarning(text, UserWarning, "file.py", 1) for text in ("slow", "slow", "large")]
    assert lines == ["warning: slow\n", "", "warning: large\n"]


def test_the_doctor_prints_the_plan_once_and_leaves_no_folder(capfd, tmp_path):
    main(["doctor", *FIT[1:], *QUICK, f"--trainer.default_root_dir={tmp_path}", "--trainer.devices=2", "--method=MOON"])
    said = capfd.readouterr().out
    assert said.count("methods  ") == said.count("MOON(") == 1
    assert "2 worker" in said
    assert said.splitlines()[-1] == "warnings          none"
    assert not list(tmp_path.iterdir())
