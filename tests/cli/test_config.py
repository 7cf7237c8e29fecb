"""What a parser lets pass of a config, and whose errors become one line."""

import pytest
from helpers.errors import refused
from jsonargparse import Namespace

from fl_lightning.cli.config import building, check_nulls, check_resolved
from fl_lightning.data import PACS, Digits
from fl_lightning.errors import UsageError
from fl_lightning.models import MLP


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with refused(f"seed_everything={seed}"):
        check_resolved({"trainer": Namespace(), "seed_everything": seed})
    for fits in (None, True, False, 0, 2**32 - 1):
        check_resolved({"trainer": Namespace(), "seed_everything": fits})


def test_null_is_refused_where_the_type_has_none():
    inner = Namespace(class_path="fl_lightning.data.Dirichlet", init_args=Namespace(alpha=None))
    data = Namespace(class_path="fl_lightning.data.Digits", init_args=Namespace(partitioner=inner, image_size=None))
    with refused("Dirichlet.alpha=null"):
        check_resolved({"trainer": Namespace(), "seed_everything": 0, "data": data})
    with refused("PACS.batch_size=null"):  # an argument that goes to a base
        check_nulls(PACS, {"batch_size": None}, "PACS")
    check_nulls(Digits, {"partitioner": None, "train_size": None, "mean": None, "augment": None}, "Digits")


def test_an_error_of_a_library_is_told_with_the_class_and_its_arguments():
    with refused("MLP(in_features=8, hidden=['a'])", "arguments"), building():
        MLP(8, ["a"])


def test_an_error_of_a_users_class_is_unchanged():
    def build():
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as caught, building():
        build()
    assert not isinstance(caught.value, UsageError)
