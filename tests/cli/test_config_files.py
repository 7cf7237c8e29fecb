"""A file that is the value of a key is read with the same checks as a config."""

import sys
from contextlib import nullcontext

import pytest
from helpers.bad_input import BASE
from helpers.errors import assert_names, refused

from fl_lightning.cli import main
from fl_lightning.cli.config_checks import building
from fl_lightning.cli.config_files import check_command
from fl_lightning.models import MLP
from fl_lightning.utilities.errors import UsageError

TWICE = "class_path: Dirichlet\nclass_path: IID\n"


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path, one_parser):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "names.yaml").write_text("data: {init_args: {partitioner: inner.yaml}}\n")


def line_of(capsys, *args):
    """The line with which a fit is refused."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "base.yaml", *args])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    return next(line for line in said.splitlines() if line.startswith("error: ")).removeprefix("error: ")


@pytest.mark.parametrize(
    ("args", "content", "key", "place"),
    [
        (["--config", "names.yaml"], TWICE, "data.partitioner", "line 2, column 1"),
        (["--trainer", "inner.yaml"], "name: a\n\tmax_rounds: 1\n", "trainer=", "inner.yaml"),
        (["--trainer.callbacks+", "inner.yaml"], "- a: 1\n  a: 2", "trainer.callbacks", "line 2, column 3"),
    ],
)
def test_a_damaged_file_that_is_the_value_of_a_key_is_refused_by_the_key(capsys, tmp_path, args, content, key, place):
    (tmp_path / "inner.yaml").write_text(content)
    assert_names(line_of(capsys, *args), key, place)


def test_a_sound_file_that_is_the_value_of_a_key_is_read(capsys, tmp_path):
    (tmp_path / "inner.yaml").write_bytes("\ufeffclass_path: Dirichlet\ninit_args: {alpha: 1e-1}\n".encode())
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "base.yaml", "--config", "names.yaml", "--print_config"])
    assert "alpha: 0.1\n" in capsys.readouterr().out


def test_a_text_need_not_be_yaml(capsys):
    for name in ("1:30", "{a: 1, a: 2}"):
        with pytest.raises(SystemExit, match="0"):
            main(["fit", "--config", "base.yaml", f"--trainer.name={name}", "--data.num_clients=010", "--print_config"])
        config = capsys.readouterr().out
        assert f"name: {name}\n" in config.replace("'", "") and "num_clients: 10\n" in config


def test_a_method_that_is_a_key_is_answered_with_the_form_of_its_arguments():
    with refused("method=FedProx", "class_path: FedProx", "init_args"):
        check_command(["fit", "--method=[{FedProx: {mu: 0.1}}]"])


@pytest.mark.parametrize("option", ["--method.1.init_args.mu", "--trainer.callbacks.0.init_args.patience"])
def test_an_item_of_a_list_by_its_number_is_refused_with_the_remedy(option):
    with refused(f"{option}='0.1'", "+=", "--config"):
        check_command(["fit", "--method+=FedDecorr", "--method+=FedProx", option, "0.1"])
    check_command(["fit", "--method+=FedProx", "--method.mu", "0.1", "--method+=FedDecorr"])


@pytest.mark.parametrize("data", ["Digits", "mine.Data"])
def test_a_short_name_is_refused_early_where_no_module_of_ones_own_may_define_it(monkeypatch, data):
    monkeypatch.delitem(sys.modules, "torch")
    with nullcontext() if data == "mine.Data" else refused("method='Mine'"):
        check_command(["fit", f"--data={data}", "--method=[FedProx, Mine]"])


def test_a_config_may_change_arguments_of_the_method_of_an_earlier_one(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    check_command(["fit", "--config={method: FedProx}", "--config={method: {init_args: {mu: 0.2}}}"])


def test_an_error_of_a_library_is_told_with_the_class_and_its_arguments():
    with refused("MLP(in_features=8, hidden=['a'])", "arguments"), building():
        MLP(8, ["a"])


def test_an_error_of_a_users_class_is_unchanged():
    def build():
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as caught, building():
        build()
    assert not isinstance(caught.value, UsageError)
