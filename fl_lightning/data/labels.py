"""Labels and domains of a data set, from the columns of the usual libraries, or else from its items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fl_lightning.core.seeding import base_seed, rng_scope
from fl_lightning.utilities.errors import require

# where an item or a batch that is a dictionary has its labels
LABEL_KEYS = ("labels", "label", "target", "targets", "y")
# attributes that hold the labels of all examples: torchvision's, and `y` of the in-memory sets of PyTorch Geometric
LABEL_ATTRIBUTES = ("targets", "labels", "_labels", "target", "label", "y")
# torchvision's lists of pairs (file, label)
PAIRS = ("samples", "_samples")
# items that are compared with a column, evenly spaced
COMPARED = 20
DOMAIN_KEYS = ("domains", "domain", "sites", "site")


def dataset_labels(loader: DataLoader) -> np.ndarray | None:
    """Integer labels ``(N,)`` of a loader's data set; None if it has none, or more than one for an example.

    They are read from a column where there is one: an attribute such as ``targets``, a column of a Hugging Face set,
    the second tensor of a TensorDataset. Otherwise they are read from the items: the second entry of a pair, or the
    entry or attribute whose name is in :data:`LABEL_KEYS`. Booleans count as integers, and ``(N, 1)`` as ``(N,)``.

    Raises:
        UsageError: some of :data:`COMPARED` items that are read have another label than the column.
    """
    dataset: Any = loader.dataset
    number = len(dataset)
    labels = _stored_labels(dataset, number)
    if labels is None:
        return _labels_of_items(dataset, range(number))
    indices = np.linspace(0, number - 1, min(number, COMPARED)).astype(int)
    # in a worker where the loader has some: a file that an item opens must not be open when they start
    names = ("multiprocessing_context", "worker_init_fn")
    worker_options = {name: getattr(loader, name) for name in names}
    items = None
    with suppress(Exception):  # what an item raises is an error of training, which names client and round
        items = _labels_of_items(dataset, indices.tolist(), num_workers=min(loader.num_workers, 1), **worker_options)
    for index, label in zip(indices, () if items is None else items, strict=False):
        hint = f"{type(dataset).__name__} stores this label for item {index}, which has {label}; give it an attribute "
        require(labels[index] == label, "data: labels", int(labels[index]), f"{hint}targets with the items' labels")
    return labels


def _stored_labels(dataset: Dataset, number: int) -> np.ndarray | None:
    """Labels ``(N,)`` of a column of the data set, or of those within a Subset or ConcatDataset; None without one."""
    for column in _columns(dataset):
        # an attribute of such a name may hold something else, for example the names of the classes
        labels = _integers(column, number)
        if labels is not None:
            transform = getattr(dataset, "target_transform", None)
            if transform is None:
                return labels
            with rng_scope(base_seed(), "labels"):
                changed = _integers([transform(label) for label in labels.tolist()], number)
            # a transform may give something else than a class
            return labels if changed is None else changed
    return _joined(dataset, lambda part: _stored_labels(part, len(part)))


def _joined(dataset: Any, read: Callable[[Any], np.ndarray | None]) -> np.ndarray | None:
    """What ``read`` gives for the data sets within a Subset or ConcatDataset; None if one of them lacks it."""
    if isinstance(dataset, Subset):
        inner = read(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, np.int64)]
    arrays = list(map(read, dataset.datasets)) if isinstance(dataset, ConcatDataset) else [None]
    known_arrays = [array for array in arrays if array is not None]
    return np.concatenate(known_arrays) if known_arrays and len(known_arrays) == len(arrays) else None


def domains_of(dataset: Dataset, key: str | None = None) -> np.ndarray | None:
    """Return the domain of each example ``(N,)``, an integer or a name; None without domains.

    The domains are the attribute or column ``key`` (None tries :data:`DOMAIN_KEYS`) of the data set, or of the data
    sets within a Subset or ConcatDataset. A single name, such as ``site = "north"``, is the domain of all examples.
    """
    number = len(dataset)  # type: ignore[arg-type]
    for name in DOMAIN_KEYS if key is None else (key,):
        for column in (getattr(dataset, name, None), _named_column(dataset, name)):
            if isinstance(column, (str, int)):
                return np.full(number, column)
            values = np.asarray(column) if isinstance(column, (list, tuple, np.ndarray, Tensor)) else np.zeros(())
            if values.shape == (number,) and values.dtype.kind in "iubU":
                return values
    return _joined(dataset, lambda part: domains_of(part, key))


def class_names_of(dataset: Any, number: int) -> list[str]:
    """Return the names of the first ``number`` classes, as torchvision and Hugging Face store them; may be empty."""
    if isinstance(dataset, Subset):
        return class_names_of(dataset.dataset, number)
    if isinstance(dataset, ConcatDataset):
        of_parts = [class_names_of(part, number) for part in dataset.datasets]
        return of_parts[0] if all(names == of_parts[0] for names in of_parts) else []
    features = getattr(dataset, "features", None) or {}
    columns = [features.get(key) for key in LABEL_KEYS] if isinstance(features, Mapping) else []
    candidates = [getattr(column, "names", None) for column in columns]
    for names in (getattr(dataset, "classes", None), *candidates):
        if not isinstance(names, (list, tuple)) or len(names) < number:
            continue
        if all(isinstance(name, str) for name in names):
            return list(names[:number])
    return []


def _columns(dataset: Dataset) -> Iterator[Any]:
    """Candidates for the labels of all examples, the most likely first."""
    for name in LABEL_ATTRIBUTES:
        yield getattr(dataset, name, None)
    for key in LABEL_KEYS:
        yield _named_column(dataset, key)
    for name in PAIRS:
        pairs = getattr(dataset, name, None)
        if not isinstance(pairs, (list, tuple)):
            continue
        if all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            yield [label for _, label in pairs]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        yield dataset.tensors[1]


def _named_column(dataset: Any, key: str) -> Any:
    """A stored column of a Hugging Face set, without the set's transform."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, (list, tuple)) or key not in names:
        return None
    untransformed = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    return untransformed[key][:]


def _labels_of_items(dataset: Any, indices: Sequence[int], **options: Any) -> np.ndarray | None:
    labels: list[int] = []
    try:
        # a user's augmentation draws from the global generators, which must not be moved
        with rng_scope(base_seed(), "labels"):
            for (example,) in DataLoader(dataset, sampler=indices, collate_fn=list, **options):
                arrays = (np.reshape(_array(value), -1) for value in label_entries(example))
                candidates = (_integers(array, 1) for array in arrays)
                integers = [label for label in candidates if label is not None]
                if not integers:
                    return None
                labels.append(int(integers[0][0]))
    except (TypeError, IndexError, KeyError, ValueError):
        return None
    return np.array(labels, np.int64)


def label_entries(example: Any) -> list[Any]:
    """Yield candidates for the labels of an item or a batch: values with usual names, or the second of a pair."""
    if isinstance(example, Mapping):
        return [example[key] for key in LABEL_KEYS if key in example]
    attributes = [getattr(example, key) for key in LABEL_KEYS if hasattr(example, key)]
    # an item that is one tensor, such as token numbers, is an input alone and not a pair (input, label)
    return attributes or (list(example[1:2]) if isinstance(example, (tuple, list)) else [])


def _integers(values: Any, number: int) -> np.ndarray | None:
    """``values`` as int64 ``(N,)``; None unless they are N integers or booleans."""
    try:
        array = _array(values)
    except (TypeError, ValueError):  # nested lists of different lengths, a type that NumPy does not have
        return None
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    return array.astype(np.int64) if array.shape == (number,) and array.dtype.kind in "iub" else None


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
