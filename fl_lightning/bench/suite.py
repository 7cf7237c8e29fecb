"""A suite: base configs, axes and seeds, which make cells; and the tables to make of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning.bench.cell import Cell, Labels, file_part
from fl_lightning.bench.config_fragments import Fragment, in_classes, look_up, merged_config, nested_config
from fl_lightning.bench.criteria import Criteria
from fl_lightning.bench.shows import Published, Show
from fl_lightning.utilities.errors import require

Choice = dict[str, tuple[str, ...]]
# ends the name of a suite that is tried without its data set
OF_OFFLINE = "-offline"
NO_MEANING = "numbers without meaning"
# sizes of an offline run: clients at most; examples of a batch, and of a client at least; rounds
OFFLINE_CLIENTS, OFFLINE_BATCH, OFFLINE_ROUNDS = 4, 4, 2
# clients of partitioners that need more, such as to hold all classes
MORE_CLIENTS = {"ClassesPerClient": 10}
# data sets that are generated, and those that the package holds; the others have an argument ``offline``
GENERATED, EMBEDDED = ("Synthetic", "SyntheticPerClass"), ("Digits",)
# arguments of the trainer that are at most these, and of partitioners that are these
SMALLER = {"local_steps": 2, "cohort_size": OFFLINE_CLIENTS}
SMALLEST: dict[str, Fragment] = {
    "Dirichlet": {"min_size": OFFLINE_BATCH, "repair": "move"},  # to draw again would take long, or never end
    "DomainDirichlet": {"min_size": OFFLINE_BATCH},
    "QuantityDirichlet": {"min_size": OFFLINE_BATCH},
    "Shards": {"per_client": 2},
}
# over how many rounds torch's CosineAnnealingLR lowers the rate
OVER_ROUNDS = "client_lr_scheduler.init_args.T_max"
# the config before the suite's; a fixed number of threads fixes the bits
DEFAULTS: Fragment = {
    "seed_everything": 0,
    "method": [],
    "trainer": {"devices": 1, "threads_per_worker": 1, "enable_progress_bar": False},
}


@dataclass(frozen=True)
class Table:
    """A table of the cells.

    Args:
        show: the number of a run that it shows.
        rows: axes whose labels are the rows.
        columns: axes whose labels are the columns.
        page: page or section of the paper with the published numbers.
        caption: name of the table in the paper.
        published: published mean and, if stated, deviation, by the labels of rows and columns in this order.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    show: Show
    page: int | str | None = None
    caption: str = ""
    published: Mapping[tuple[str, ...], Published] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Suite(Criteria):
    """A grid of runs and their tables; the further arguments say how its tables compare the runs.

    Args:
        path: its file.
        title: its title.
        source: source of the published numbers.
        notes: details that the source does not state, and our choices.
        base: fragments of all cells.
        axes: fragments of each label, by axis.
        overrides: labels, or lists of labels, with additional fragments for their cells.
        exclude: labels, or lists of labels, whose cells are omitted.
        tables: the tables.
        tune: search for arguments, see :mod:`fl_lightning.bench.tuner`.
        finished: file of finished cells that come with the suite; None for none.
        offline: whether its cells are tiny runs on generated data, see :func:`offline_work`.
    """

    path: Path
    title: str
    base: tuple[Fragment, ...]
    axes: Mapping[str, Mapping[str, tuple[Fragment, ...]]]
    tables: tuple[Table, ...]
    source: str = ""
    notes: tuple[str, ...] = ()
    overrides: tuple[tuple[Choice, tuple[Fragment, ...]], ...] = ()
    exclude: tuple[Choice, ...] = ()
    tune: Mapping[str, Any] = field(default_factory=dict)
    finished: Path | None = None
    offline: bool = False

    @property
    def name(self) -> str:
        """Name of its study: folder and file, such as ``fedcka-table2``."""
        name = f"{self.path.resolve().parent.name}-{self.path.stem}"
        return f"{name}{OF_OFFLINE}" if self.offline else name

    @property
    def tuned_axes(self) -> list[str]:
        """The axes on which ``tune`` has a study for each label, and a folder of files."""
        fixed = {"method", *self.tune.get("at", {})}
        return [axis for axis in self.axes if axis not in fixed and len(self.axes[axis]) > 1]

    def combinations(self) -> Iterator[Labels]:
        """Return the labels of each cell, in the order of the axes, without excluded cells."""
        for labels in itertools.product(*self.axes.values()):
            combination = dict(zip(self.axes, labels, strict=True))
            if not any(matches(combination, when) for when in self.exclude):
                yield combination

    def cells(
        self, scale: float = 1.0, extra: Sequence[Fragment] = (), seeds: Sequence[int] | None = None
    ) -> list[Cell]:
        """Return the cells, seed by seed, so that the table fills evenly.

        Args:
            scale: share of the work to do, see :func:`scaled_work`.
            extra: fragments after the suite's, such as the location of the data.
            seeds: seeds to take instead of the suite's.

        Raises:
            UsageError: two cells differ only in keys that cannot change a result, or ``extra`` has a method for all.
        """
        hint = "would replace every row's method; add a label on the axis method, or use method+"
        replaced = [part["method"] for part in extra if "method" in part and "method" in self.axes]
        require(not replaced, "--config: method", next(iter(replaced), None), hint)
        cells = list[Cell]()
        for seed in self.seeds if seeds is None else seeds:
            cells += (self.cell(labels, seed, scale, extra) for labels in self.combinations())
        by_digest: dict[str, Cell] = {}
        for cell in cells:
            earlier = by_digest.setdefault(cell.digest, cell)
            hint = "these cells differ only in where their files are or in how they are run, so that the result of one "
            hint += "would stand for the other; use a suite for each"
            require(cell.config == earlier.config, f"{self.path}: axes", f"{earlier.name} and {cell.name}", hint)
        return cells

    def cell(self, labels: Labels, seed: int, scale: float = 1.0, extra: Sequence[Fragment] = ()) -> Cell:
        """The cell of some labels and a seed."""
        parts = [DEFAULTS, *self.base]
        for axis, label in labels.items():
            parts += self.axes[axis][label]
        for when, fragments in self.overrides:
            if matches(labels, when):
                parts += fragments
        if scale != 1:
            parts.append(scaled_work(merged_config(parts), scale))
        parts += extra
        if self.offline:
            parts.append(offline_work(merged_config(parts)))
        parts.append({"seed_everything": seed})
        num_classes = look_up(merged_config(parts), "model.init_args.num_classes")
        return Cell(labels, seed, tuple(in_classes(part, num_classes) for part in parts if part), scale)


def scaled_work(config: Fragment, scale: float) -> Fragment:
    """The fragment that makes the run of a config do about the share F of its work, in (0, 1].

    The rounds, the local epochs (or steps) and the training examples are each multiplied by the cube root of F. Where
    ``data.init_args.train_size`` is null, which means all examples, the share takes its place. A number of examples
    stays large enough for a batch of each client. A cosine over all rounds becomes one over the fewer rounds.
    """
    require(0 < scale <= 1, "--scale", scale, "use a share of the work above 0, up to 1")
    share = scale ** (1 / 3)
    trainer, of_data = config.get("trainer") or {}, (config.get("data") or {}).get("init_args") or {}
    work = "local_steps" if trainer.get("local_steps") else "local_epochs"
    full = {"max_rounds": trainer.get("max_rounds", 10), work: trainer.get(work, 1)}
    fewer: Fragment = {key: max(1, round(share * value)) for key, value in full.items()}
    if look_up(trainer, OVER_ROUNDS) == full["max_rounds"]:
        fewer |= nested_config(OVER_ROUNDS, fewer["max_rounds"])
    if "train_size" not in of_data:
        return {"trainer": fewer}
    size = of_data["train_size"]
    examples: Any = share * size if size else round(share, 4)
    if isinstance(size, int):
        factors = (of_data.get(key) for key in ("batch_size", "num_clients"))
        batches = math.prod(factor for factor in factors if isinstance(factor, int))
        examples = min(size, max(batches, round(share * size)))
    return {"trainer": fewer, "data": {"init_args": {"train_size": examples}}}


def without_data(suite: Suite) -> Suite:
    """Return a suite whose cells need no data set: tiny runs of one seed, without published numbers beside them."""
    note = f"Run with --offline: {OFFLINE_ROUNDS} rounds on a few generated or embedded examples. This shows that the "
    note += "suite runs; its numbers mean nothing."
    tables = []
    for table in suite.tables:
        caption = ": ".join(filter(None, [f"Offline, {NO_MEANING}", table.caption]))
        tables.append(replace(table, caption=caption, published={}))
    title = f"{suite.title} (offline: {NO_MEANING})"
    seeds, notes = suite.seeds[:1], (note, *suite.notes)
    return replace(suite, title=title, notes=notes, tables=tuple(tables), seeds=seeds, offline=True, decide=None)


def offline_work(config: Fragment) -> Fragment:
    """The fragment that makes a config a tiny run without files: generated data, few clients, small batches.

    Every client has examples for a batch, so that each step of a method is taken. Initial weights are dropped.
    """
    trainer, of_data = config.get("trainer") or {}, (config.get("data") or {}).get("init_args") or {}
    partitioner = class_name(of_data.get("partitioner"))
    attackers = max((look_up(part, "init_args.f") or 0 for part in config.get("method") or []), default=0)
    max_clients = MORE_CLIENTS.get(partitioner, OFFLINE_CLIENTS)
    if attackers:  # no robust rule needs more clients than MultiKrum
        max_clients = max(max_clients, 2 * attackers + 3)
    clients = min(of_data.get("num_clients") or max_clients, max_clients)
    rounds = min(trainer.get("max_rounds", 10), OFFLINE_ROUNDS)
    fewer: Fragment = {"max_rounds": rounds, "local_epochs": 1}
    fewer |= {key: min(trainer[key], limit) for key, limit in SMALLER.items() if trainer.get(key)}
    if look_up(trainer, OVER_ROUNDS) == trainer.get("max_rounds", 10):
        fewer |= nested_config(OVER_ROUNDS, rounds)
    small: Fragment = {"num_clients": clients, "batch_size": OFFLINE_BATCH}
    name = class_name(config.get("data"))
    if name in GENERATED:
        small |= {"largest": 5 * OFFLINE_BATCH}
    else:
        small |= {"train_size": 2 * clients * OFFLINE_BATCH, "test_size": 5 * OFFLINE_BATCH, "drop_last": "singletons"}
        if name not in EMBEDDED:
            small["offline"] = True
        if of_data.get("val_fraction"):
            small["val_fraction"] = 0.25
        if partitioner in SMALLEST:
            small |= nested_config("partitioner.init_args", SMALLEST[partitioner])
    weights = {"weights": None} if config.get("weights") else {}
    return {"trainer": fewer, "data": {"init_args": small}, **weights}


def class_name(part: Any) -> str:
    """The name of the class of a part of a config; empty without one."""
    path = part.get("class_path") if isinstance(part, Mapping) else part
    return str(path or "").rpartition(".")[2]


def selected_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that match any of some patterns, such as ``method=FedCKA,alpha=0.1``; all of them without a pattern.

    A pattern has labels of any axes and ``seed``, as the suite has them or as the names of cells do.
    """
    selected: set[str] = set()
    # a label may contain commas
    axes = "|".join(re.escape(axis) for cell in cells[:1] for axis in (*cell.labels, "seed"))
    for pattern in only:
        pairs = (term.partition("=") for term in re.split(f",(?=(?:{axes})=)", pattern))
        terms = {f"{axis}{equals}{file_part(label)}" for axis, equals, label in pairs}
        matching = {cell.name for cell in cells if terms <= set(cell.name.split(","))}
        hint = f"no cell matches; one is called {cells[0].name if cells else ''}: use one or more of its parts"
        require(bool(matching), "--only", pattern, hint)
        selected |= matching
    return [cell for cell in cells if not only or cell.name in selected]


def first_seeds(seeds: Sequence[int], number: int | None) -> list[int]:
    """The first few of some seeds, and the smallest others where there are not enough; None for those themselves."""
    unused = (seed for seed in itertools.count() if seed not in seeds)
    return list(itertools.islice(itertools.chain(seeds, unused), number or len(seeds)))


def matches(labels: Labels, when: Choice) -> bool:
    """Whether labels have one of the labels of ``when`` on each of its axes, where they have that axis."""
    return all(labels.get(axis) in allowed for axis, allowed in when.items())
