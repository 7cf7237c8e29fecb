"""An example of each class that a config can name, as YAML and Python, and its picture, for the pages of classes.

The examples are made from the signatures, by ``conf.py`` when the site is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch.optim import Optimizer

from fl_lightning import callbacks, data, models
from fl_lightning.callbacks import Callback
from fl_lightning.core.method import Method
from fl_lightning.data import Augmentation, FederatedDataModule, Partitioner
from fl_lightning.models import BaseProjector, Encoder, ImageClassifier

DOCS = Path(__file__).resolve().parent
# pictures of classes, which docs/make_pictures.py draws
PICTURES = "figures/classes"
# values of arguments without a default
VALUES = {"path": "runs/feduv/version_0/plan.npz", "monitor": "test/accuracy", "lr": 0.1}
# arguments that say more than those that would be chosen
CHOSEN = {
    "Backbone": {"network": "torchvision.models.efficientnet_b0"},
    "BestCheckpoint": {"monitor": "test/accuracy", "mode": "max"},
    "ClientDirichlet": {"alpha": 0.5},
    "EarlyStopping": {"monitor": "test/accuracy", "mode": "max", "patience": 10},
    "ETFClassifier": {"in_features": 64, "num_classes": 10},
    "Embedding": {"examples": 512, "clients": [0, 1]},
    "FedUV": {"mu": 0.5},
    "MLP": {"in_features": 64, "hidden": [64]},
    "ResNet18": {"in_channels": 3, "norm": "group"},
    "ResNet50": {"in_channels": 3, "norm": "group"},
    "Scores": {"local_steps": 10},
    "SiteImageFolders": {"root": "hospitals", "image_size": 64},
    "SpectrumMonitor": {"every_n_rounds": 1, "local_models": True},
}
# classes that are the base of others, and callbacks that every run has by itself
NO_EXAMPLE = {Augmentation, BaseProjector, Callback, Encoder, FederatedDataModule, Method, Partitioner}
NO_EXAMPLE |= {callbacks.Measurement, callbacks.ProgressBar, callbacks.RunRecord, data.ImageDataModule}
# data with domains or with own clients, and their partitioners
OF_DOMAINS = {"ByDomain": "PACS", "DomainDirichlet": "PACS", "Natural": "FEMNIST"}
PARTITIONED_BY = {"PACS": "ByDomain", "OfficeHome": "ByDomain", "HAM10000": "ByDomain", "FEMNIST": "Natural"}


@dataclass(frozen=True)
class Node:
    """An object of an example: the name of its class, and its arguments."""

    name: str
    arguments: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        values = {key: value.config() if isinstance(value, Node) else value for key, value in self.arguments.items()}
        return {"class_path": self.name} | ({"init_args": values} if values else {})

    def python(self) -> str:
        return f"{self.name.rpartition('.')[2]}({', '.join(self.keywords())})"

    def keywords(self) -> Iterator[str]:
        for key, value in self.arguments.items():
            bare = key in ("network", "classifier")  # a function or class, which a config names as a text
            text = value.python() if isinstance(value, Node) else value if bare else repr(value)
            yield f"{key}={text}"


def node_of(kind: type) -> Node:
    """A class with the arguments that it needs, and with the first two numbers of the others."""
    name, arguments, numbers = kind.__name__, {}, 0
    for key, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or key == "params":
            continue
        is_number = type(parameter.default) in (int, float) and numbers < 2
        numbers += is_number
        if parameter.default is parameter.empty:
            arguments[key] = VALUES.get(key)
        elif is_number or key == "root":
            arguments[key] = parameter.default
    return Node(name, CHOSEN.get(name, arguments))


def example_of(kind: type) -> tuple[dict[str, Any], str] | None:
    """The keys of a config and the line of Python that use a class; None where a config cannot name it."""
    if kind in NO_EXAMPLE or not inspect.isclass(kind):
        return None
    node, digits = node_of(kind), {"num_clients": 10}
    if issubclass(kind, Method):
        return {"method": [node.config()]}, f"trainer.fit(model, data, method=[{node.python()}])"
    if issubclass(kind, Callback):
        return {"trainer": {"callbacks": [node.config()]}}, f"FederatedTrainer(callbacks=[{node.python()}])"
    if issubclass(kind, Optimizer):
        made = f"partial({', '.join([node.name, *node.keywords()])})"
        return {"trainer": {"server_optimizer": node.config()}}, f"FederatedTrainer(server_optimizer={made})"
    if issubclass(kind, Partitioner):
        whole = Node(OF_DOMAINS.get(node.name, "Digits"), digits | {"partitioner": node})
        return {"data": whole.config()}, f"data = {whole.python()}"
    if issubclass(kind, Augmentation):
        config = Node("CIFAR10", {"augment": [node.config()]}).config()
        return {"data": config}, f"data = CIFAR10(augment=[{node.python()}])"
    if issubclass(kind, FederatedDataModule):
        return of_data(node)
    if issubclass(kind, (Encoder, BaseProjector)):
        key = {"encoder": node} if issubclass(kind, Encoder) else {"encoder": node_of(models.MLP), "projector": node}
        whole = Node("ImageClassifier", key)
        return {"model": whole.config()}, f"model = {whole.python()}"
    if kind is ImageClassifier:
        whole = Node(node.name, {"encoder": node_of(models.MLP), "num_classes": 10})
        return {"model": whole.config()}, f"model = {whole.python()}"
    if kind is models.ETFClassifier:
        whole = Node("ImageClassifier", {"encoder": node_of(models.MLP), "classifier": kind.__name__})
        return {"model": whole.config()}, f"model = {whole.python()}"
    return None


def of_data(node: Node) -> tuple[dict[str, Any], str]:
    """Return the example of a data set: ten clients with skewed labels, unless it has its own clients."""
    arguments = dict(node.arguments)
    if node.name == "Partitioned":
        arguments = {"datamodule": Node("lightning.pytorch.demos.boring_classes.BoringDataModule", {})}
        arguments |= {"partitioner": Node("IID", {}), "num_clients": 10}
    elif issubclass(getattr(data, node.name), data.ImageDataModule) and "Site" not in node.name:
        own = PARTITIONED_BY.get(node.name)
        arguments |= {"num_clients": 4 if own == "ByDomain" else 10}
        arguments |= {"partitioner": Node(own, {}) if own else Node("Dirichlet", {"alpha": 0.1})}
    whole = Node(node.name, arguments)
    return {"data": whole.config()}, f"data = {whole.python()}"


def lines_of(kind: type) -> Iterator[str]:
    """The example of a class, and its picture if there is one, as reStructuredText."""
    example = example_of(kind)
    if example is not None:
        config, python = example
        text = yaml.dump(config, Dumper=Flow, sort_keys=False, width=100)
        yield from ("", ".. rubric:: Example", "", ".. code-block:: yaml", "")
        yield from (f"   {line}" for line in text.splitlines())
        yield from ("", ".. code-block:: python", "", f"   {python}", "")
    picture = f"{PICTURES}/{kind.__name__}.png"
    if (DOCS / picture).is_file():
        yield from ("", f".. image:: /{picture}", f"   :alt: what {kind.__name__} gives", "")


class Flow(yaml.SafeDumper):
    """YAML with a class and its arguments on one line, unless an argument is a class."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        nested = str(mapping.get("init_args", "")).count("class_path")
        return super().represent_mapping(tag, mapping, flow_style="class_path" in mapping and not nested)


def add_example(app: Any, what: str, name: str, kind: type, options: Any, lines: list[str]) -> None:
    """Called by Sphinx with the docstring of each class."""
    if what == "class" and kind.__module__.startswith("fl_lightning."):  # modules have members of libraries, too
        lines += lines_of(kind)
