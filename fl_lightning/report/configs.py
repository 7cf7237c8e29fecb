"""The parts of a config that matter to a comparison: methods, data set, and the keys that decide the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fl_lightning.bench.config_fragments import OF_METHOD, is_of_method, look_up, of_result
from fl_lightning.storage.hyperparameters import numbered

Flat = dict[str, str]
ABSENT = "-"
# keys of a config that start or resume a run without changing its result
BEGINNING = ("ckpt_path", "allow_changes", "seed_everything")
# arguments of the trainer and of the data that change a result only by rounding
CALCULATION = (
    *("trainer.threads_per_worker", "trainer.clients_per_step", "trainer.accelerator", "trainer.strategy"),
    *("trainer.compile", "trainer.channels_last", "trainer.on_client_error", "trainer.min_clients"),
)
LOADING = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "eval_batch_size")
# callbacks of this package that change the result of a run
ACTING = ("EarlyStopping", "CCVR")
# arguments that distinguish data sets of one class; a folder is shown by its name
KEYS_APART = {
    **{"NpyImages": ("root",), "ImageFolderImages": ("root",)},
    **dict.fromkeys(("Synthetic", "SyntheticPerClass"), ("alpha", "beta")),
}
UNKNOWN = "unknown data set"


def class_of(value: Any) -> str:
    """Return the class name of an entry; empty for a plain value."""
    named = isinstance(value, Mapping) and "class_path" in value
    return exact(str(value["class_path"])).rsplit(".", 1)[-1] if named else ""


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that decides the result of a run, by dotted key, without the seed.

    The value of a key with a class is the class name, and the keys below it are its arguments: ``data.partitioner`` is
    ``Dirichlet`` and ``data.partitioner.alpha`` is 0.1.
    """
    kept = {key: value for key, value in of_result(dict(config)).items() if key not in BEGINNING}
    trainer = kept.get("trainer")
    if isinstance(trainer, Mapping) and isinstance(trainer.get("callbacks"), list):
        # a user's own callback may change a result
        acting = [
            one
            for one in trainer["callbacks"]
            if class_of(one) in ACTING or not str(look_up(one, "class_path")).startswith("fl_lightning.")
        ]
        kept["trainer"] = {**trainer, "callbacks": acting}
    return {
        key: value
        for key, value in items(kept)
        if not (key.startswith("data.") and key.rsplit(".", 1)[-1] in LOADING)
        and not f"{key}.".startswith(tuple(f"{one}." for one in CALCULATION))
    }


def items(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a nested config; a class appears by its name."""
    name = class_of(value)
    if name:
        yield key, name
        value = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    if isinstance(value, Mapping):
        for inner, one in value.items():
            yield from items(one, f"{key}.{exact(str(inner))}" if key else exact(str(inner)))
    elif isinstance(value, list) and value and all(map(class_of, value)):
        for kind, entry in zip(numbered(map(class_of, value)), value, strict=True):
            yield from items(entry, f"{key}.{kind}")
    elif not (value is None or value == []):
        yield key, value


def in_texts(settings: Mapping[str, Any]) -> Flat:
    """Return values of a config as a table shows them."""
    return {key: config_text(value) for key, value in settings.items()}


def config_text(value: Any) -> str:
    """Return a value of a config as a table shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(config_text, value)) if isinstance(value, list) else exact(str(value))


def exact(text: str) -> str:
    """Return a text, or its literal if it has control characters, so that different texts stay different."""
    return text if text.isprintable() else repr(text)


def data_set(config: Mapping[str, Any]) -> str:
    """Return the name of the data set of a run."""
    data: Any = config.get("data") or {}
    inner = look_up(data, "init_args.datamodule") if class_of(data) == "Partitioned" else None
    data = inner if class_of(inner) else data
    name, arguments = class_of(data), data.get("init_args") or {}
    known = [arguments[key] for key in KEYS_APART.get(name, ()) if arguments.get(key) is not None]
    apart = ", ".join(PurePath(exact(str(value))).name for value in known)
    return f"{name} ({apart})" if apart else name or UNKNOWN


def max_rounds(config: Mapping[str, Any]) -> int | None:
    """Return the number of rounds of a config; None where it has none."""
    number = (config.get("trainer") or {}).get("max_rounds")
    return number if type(number) is int and number >= 0 else None


def method_names(config: Mapping[str, Any]) -> str:
    """Return the methods of a run and the class of its server optimizer; FedAvg without either."""
    methods = config.get("method") or []
    named = "+".join(filter(None, map(class_of, methods if isinstance(methods, list) else [methods]))) or "FedAvg"
    return ", server ".join(filter(None, [named, class_of(look_up(dict(config), "trainer.server_optimizer"))]))


def differing_between(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between configs, in order of appearance."""
    keys = dict.fromkeys(key for one in configs for key in one)
    return [key for key in keys if len({one.get(key) for one in configs}) > 1]


def compact(config: Flat) -> Flat:
    """Return a config in which each method, and the server optimizer, is one text with its arguments."""
    made: Flat = {}
    for key, value in config.items():
        if not is_of_method(key):
            made[key] = value
        elif key in OF_METHOD or (key.startswith("method.") and key.count(".") == 1):
            of_class = [f"{one[len(key) + 1 :]}={inner}" for one, inner in config.items() if one.startswith(f"{key}.")]
            text = f"{value}({', '.join(of_class)})" if of_class else value
            name = key if key in OF_METHOD else "method"
            made[name] = " + ".join(filter(None, [made.get(name), text]))
    return made


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest unambiguous end of each dotted key."""
    made = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        others = [other for other in keys if other != key]
        made[key] = next((one for one in ends if not any(f".{other}".endswith(f".{one}") for other in others)), key)
    return made
