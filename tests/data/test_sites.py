"""Images of several sites: folders and tables, and what is wrong with others."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import small_trainer
from PIL import Image

from fl_lightning.cli import main
from fl_lightning.data import Dirichlet, Plan, SiteImageFolders
from fl_lightning.models import MLP, ImageClassifier

SITES, CLASSES = ("kent", "oslo", "pisa"), ("benign", "malignant", "normal")


def write(folder, number, shade=0):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(number):
        rng = np.random.default_rng(shade + i)
        Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(folder / f"{i}.png")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """``whole``: ``SITE/CLASS/*``; ``split``: ``SITE/SPLIT/CLASS/*``, of which one site has validation images, too."""
    root = tmp_path_factory.mktemp("layouts")
    for number, site in enumerate(SITES, 1):
        for label, name in enumerate(CLASSES):
            write(root / "whole" / site / name, 5 * number, 10 * label)
            for part, images in (("train", 4), ("test", 2), *([("val", 1)] if site == "oslo" else [])):
                write(root / "split" / site / part / name, images)
    return root


@pytest.fixture
def whole(layouts, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(layouts / "whole", tmp_path / "whole")


@pytest.fixture
def split(layouts, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(layouts / "split", tmp_path / "sites")


def table(root, rows, head="path,label,site,split"):
    file = root / "images.csv"
    file.write_text("\n".join([head, *rows]) + "\n")
    return file


def rows_of(root):
    files = sorted(root.rglob("*.png"))
    names = [(path.relative_to(root), path.relative_to(root).parts) for path in files]
    return [f"{path},{parts[2]},{parts[0]},{parts[1]}" for path, parts in names]


def ready(root, **kwargs):
    data = SiteImageFolders(str(root), image_size=8, **kwargs)
    data.setup()
    return data


def by_domain(data):
    return {name: len(one.rows) for name, one in data.test_dataloaders_by_domain().items()}


def test_each_site_is_a_client_with_its_own_test_images_and_all_names_are_kept(whole, tmp_path, undrawn):
    before = sorted(whole.rglob("*"))
    data = ready(whole)
    assert (data.num_clients, data.domain_names, data.class_names) == (3, SITES, CLASSES)
    assert [data.info(k).domain for k in range(3)] == list(SITES)
    assert data.plan.label_counts.tolist() == [[4] * 3, [8] * 3, [12] * 3]
    assert by_domain(data) == {"kent": 3, "oslo": 6, "pisa": 9}
    assert torch.equal(data.test_dataloader(1).rows, data.test_dataloaders_by_domain()["oslo"].rows)
    trainer = small_trainer(tmp_path / "runs", max_rounds=1)
    trainer.fit(ImageClassifier(MLP(192, [8]), num_classes=3), SiteImageFolders(str(whole), image_size=8))
    with np.load(trainer.run_dir / "plan.npz") as saved:
        assert saved["domains"].tolist() == list(SITES) and saved["class_names"].tolist() == list(CLASSES)
    assert Plan.load(trainer.run_dir / "plan.npz").hash == data.plan.hash
    assert sorted(whole.rglob("*")) == before


def test_sites_may_have_splits_and_validation_images(split):
    data = ready(split)
    assert data.plan.sizes.tolist() == [12] * 3 and len(data.test_dataloader().rows) == 18
    assert torch.cat([y for _, y in data.val_dataloader()]).tolist() == [0, 1, 2]
    assert {name: len(one.rows) for name, one in data.val_dataloaders_by_domain().items()} == {"oslo": 3}
    with refused("data.val_fraction=0.5", "its own validation images"):
        ready(split, val_fraction=0.5)
    for site in SITES:
        (split / site / "test").rename(split / site / "val2")
    with refused("data.root", "kent", "val2", "train, val, test"):
        ready(split)
    for site in SITES:
        shutil.rmtree(split / site / "val", ignore_errors=True)
        (split / site / "val2").rename(split / site / "val")
    data = ready(split)  # val stands for test where there is none
    assert len(data.test_dataloader().rows) == 18 and data.val_dataloader() == []


def test_a_table_says_what_the_folders_say(split):
    by_folders, by_table = ready(split), ready(table(split, rows_of(split)))
    assert by_table.plan.hash == by_folders.plan.hash
    assert (by_table.domain_names, by_table.class_names) == (SITES, CLASSES)
    assert torch.equal(by_folders.test_dataloader(2).rows, by_table.test_dataloader(2).rows)
    drawn = ready(
        table(split, [row.rpartition(",")[0] for row in rows_of(split)], "path,label,site"), test_fraction=0.5
    )
    assert len(drawn.test_dataloader().rows) == 9 + 10 + 9


def test_numbers_as_labels_are_in_their_order(split):
    rows = [row.replace(",benign,", ",10,").replace(",malignant,", ",9,") for row in rows_of(split)]
    rows = [row.replace(",normal,", ",2,") for row in rows]
    assert ready(table(split, rows)).class_names == ("2", "9", "10")
    rows = [row.replace(",10,", ",1,").replace(",9,", ",01,").replace(",2,", ",001,") for row in rows]
    assert ready(table(split, rows)).class_names == ("001", "01", "1")  # in every process


def test_a_site_may_lack_a_class_and_one_that_only_tests_is_no_client(split):
    shutil.rmtree(split / "kent" / "train" / "normal")
    shutil.rmtree(split / "kent" / "test" / "normal")
    (split / "kent" / "test" / "normal").mkdir()  # an empty folder says the same
    shutil.rmtree(split / "oslo" / "train")
    shutil.rmtree(split / "oslo" / "val")
    data = ready(split)
    assert data.domain_names == ("kent", "pisa", "oslo") and data.num_clients == 2
    assert data.plan.label_counts.tolist() == [[4, 4, 0], [4, 4, 4]]
    assert by_domain(data) == {"kent": 4, "pisa": 6, "oslo": 6}
    shutil.rmtree(split / "pisa" / "test")
    with warned("pisa"):
        assert by_domain(ready(split)) == {"kent": 4, "oslo": 6}


def test_fewer_clients_have_several_sites_and_their_test_images(whole):
    data, sizes = ready(whole, num_clients=2), {"kent": 3, "oslo": 6, "pisa": 9}
    held = [sorted(np.unique(data.plan.domains[part])) for part in data.plan.parts]
    assert sorted(map(len, held)) == [1, 2]
    for k in range(2):
        assert len(data.test_dataloader(k).rows) == sum(sizes[SITES[site]] for site in held[k])
    other = ready(whole, num_clients=4, partitioner=Dirichlet(10.0, 1))
    assert other.plan.sizes.sum() == 72 and other.own_domains(0) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda root: [shutil.rmtree(root / site / "train" / "normal") for site in SITES], ("normal", "no training")),
        (lambda root: write(root / "rome" / "benign", 2), ("rome", "benign", "same layout")),
        (lambda root: (root / "rome" / "train" / "benign").mkdir(parents=True), ("rome", "no image")),
        (lambda root: [shutil.rmtree(root / site) for site in SITES[1:]], ("kent", "two or more sites")),
    ],
)
def test_folders_that_are_wrong_are_named(split, change, named):
    change(split)
    with refused("data.root=", *named):
        ready(split)


def test_splits_or_classes_in_the_place_of_sites_are_refused(split, whole):
    with refused("test, train", "for two or more sites"):
        ready(split / "kent")
    with refused("benign", "holds no image", "for two or more sites"):
        ready(whole / "kent")
    with refused("data.root=", "no such file"):
        ready(whole / "images.csv")


@pytest.mark.parametrize(
    ("head", "change", "named"),
    [
        ("path,label,place,split", None, ("place", "without site")),
        ("path;label;site;split", None, ("separated by commas",)),
        ("path,label,site,spilt", None, ("'spilt'", "not read")),
        (None, lambda rows: [rows[0].replace(",benign,", ",,"), *rows[1:]], ("lines 2", "empty cell")),
        (None, lambda rows: [rows[0].replace("0.png", "x.png"), *rows[1:]], ("1 of its 57 files", "x.png")),
        (None, lambda rows: [row.replace(",test", ",tset") for row in rows], ("tset", "train, val, test")),
        (None, lambda rows: [row for row in rows if not row.endswith(("test", "val"))], ("no image for test",)),
        (None, lambda rows: [], ("no rows",)),
    ],
)
def test_a_table_that_is_wrong_is_named(split, head, change, named):
    rows = rows_of(split)
    with refused("data.root=", "images.csv", *named):
        ready(table(split, change(rows) if change else rows, head or "path,label,site,split"))


@pytest.mark.thorough
def test_the_page_on_images_of_several_sites_runs(tmp_path, monkeypatch, capsys, undrawn, one_parser):
    page = (Path(__file__).parents[2] / "docs" / "own_images.md").read_text()
    monkeypatch.chdir(tmp_path)
    write, predict = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(write, {})
    (tmp_path / "hospitals.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    table = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1].splitlines()
    for line in re.findall(r"^python cli\.py (.*)$", page, re.MULTILINE)[:3]:
        few = ["--trainer.max_rounds", "1", "--trainer.local_epochs", "1"] if line.startswith("fit") else []
        main([*shlex.split(line), *few])
    exec(predict, {})
    out, said = capsys.readouterr()
    assert sum(float(number) for number in re.findall(r": (0\.\d+)", out)) == pytest.approx(1, abs=2e-3)
    for line in table[1:-1]:
        start = r"^ *" + r" +".join(line.split()[:4]) + " "
        assert len(re.findall(start, said, re.MULTILINE)) == 2, line
