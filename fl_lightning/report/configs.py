"""What a config says of a run: its method, its data set, and in which keys it differs from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fl_lightning.bench.fragments import OF_METHOD, is_of_method, look_up, of_result
from fl_lightning.records.hyperparameters import numbered

Flat = dict[str, str]
ABSENT = "-"
# keys of a whole config that say how a run began, not what it is
BEGINNING = ("ckpt_path", "allow_changes", "seed_everything")
# arguments of the trainer and of the data that say how a run is calculated: a result depends on them by rounding alone
CALCULATION = (
    *("trainer.threads_per_worker", "trainer.clients_per_step", "trainer.accelerator", "trainer.strategy"),
    *("trainer.compile", "trainer.channels_last", "trainer.on_client_error", "trainer.min_clients"),
)
LOADING = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "eval_batch_size")
# callbacks that change the result of a run; the others observe
ACTING = ("EarlyStopping", "CCVR")
# arguments that tell data sets of one class apart; of a folder the name
KEYS_APART = {
    "NpyImages": ("root",),
    "ImageFolderImages": ("root",),
    "Synthetic": ("alpha", "beta"),
    "SyntheticPerClass": ("alpha", "beta"),
}
UNKNOWN = "data set not known"


def class_of(value: Any) -> str:
    """The name of the class of a config's entry; empty where it has none."""
    named = isinstance(value, Mapping) and "class_path" in value
    return exact(str(value["class_path"])).rsplit(".", 1)[-1] if named else ""


def flat_config(config: Mapping[str, Any]) -> Flat:
    """What decides the result of a run, as texts by dotted keys; the seed is left out.

    A class is the value of its own key, and its arguments are below it: ``data.partitioner`` is ``Dirichlet``, and
    ``data.partitioner.alpha`` is ``0.1``.
    """
    return {key: config_text(value) for key, value in deciding(config).items()}


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`flat_config` has as texts, with the values that the config has."""
    kept = {key: value for key, value in of_result(dict(config)).items() if key not in BEGINNING}
    trainer = kept.get("trainer")
    if isinstance(trainer, Mapping) and isinstance(trainer.get("callbacks"), list):
        acting = [one for one in trainer["callbacks"] if acts(one)]
        kept["trainer"] = {**trainer, "callbacks": acting}
    return {key: value for key, value in items(kept) if not is_of_calculation(key)}


def is_of_calculation(key: str) -> bool:
    """Whether a dotted key says how a run is calculated, not what."""
    loading = key.startswith("data.") and key.rsplit(".", 1)[-1] in LOADING
    return loading or any(key == one or key.startswith(f"{one}.") for one in CALCULATION)


def acts(callback: Any) -> bool:
    """Whether a callback may change a result: a user's own may, those of this package observe, but for two."""
    own = str(callback.get("class_path", "")).startswith("fl_lightning.") if isinstance(callback, Mapping) else False
    return not own or class_of(callback) in ACTING


def items(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested ones; a class is its name."""
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


def config_text(value: Any) -> str:
    """A value of a config as a table shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(config_text, value)) if isinstance(value, list) else exact(str(value))


def exact(text: str) -> str:
    """A text as it is, or as Python writes it where that is not one line: two that differ stay different."""
    return text if text.isprintable() else repr(text)


def data_set(config: Mapping[str, Any]) -> str:
    """The name of the data set of a run."""
    data: Any = config.get("data") or {}
    inner = look_up(dict(data), "init_args.datamodule") if class_of(data) == "Partitioned" else None
    data = inner if class_of(inner) else data
    name = class_of(data)
    if not name:
        return UNKNOWN
    arguments = data.get("init_args") or {}
    apart = [
        PurePath(exact(str(arguments[key]))).name for key in KEYS_APART.get(name, ()) if arguments.get(key) is not None
    ]
    return f"{name} ({', '.join(apart)})" if apart else name


def method_names(config: Mapping[str, Any]) -> str:
    """The methods of a run, and the class of its server optimizer, if it has one; without both, FedAvg."""
    methods = config.get("method") or []
    named = "+".join(filter(None, map(class_of, methods if isinstance(methods, list) else [methods]))) or "FedAvg"
    server = class_of(look_up(dict(config), "trainer.server_optimizer"))
    return f"{named}, server {server}" if server else named


def methods_with_arguments(config: Mapping[str, Any]) -> str:
    """The methods of a run with their arguments, such as ``FedProx(mu=0.1)``, and its server optimizer, if it has one.

    Without any method it is FedAvg.
    """
    named = compact(flat_config(config))
    server = named.get("trainer.server_optimizer")
    return ", server ".join(filter(None, [named.get("method", "FedAvg"), server]))


def differing_between(configs: Sequence[Flat]) -> list[str]:
    """The keys whose values are not the same in all configs, in the order of the first that has them."""
    keys = dict.fromkeys(key for one in configs for key in one)
    return [key for key in keys if len({one.get(key) for one in configs}) > 1]


def compact(config: Flat) -> Flat:
    """A config in which each method is one text with its coefficients, and the server optimizer, too."""
    made: Flat = {}
    for key, value in config.items():
        prefix = next((one for one in OF_METHOD if key.startswith(f"{one}.")), None)
        if not is_of_method(key):
            made[key] = value
        elif prefix is None:
            made[key] = with_arguments(config, key, value)
        elif prefix == "method" and key.count(".") == 1:
            made["method"] = " + ".join(filter(None, [made.get("method"), with_arguments(config, key, value)]))
    return made


def with_arguments(config: Flat, key: str, name: str) -> str:
    """A class with its arguments."""
    arguments = [f"{one[len(key) + 1 :]}={value}" for one, value in config.items() if one.startswith(f"{key}.")]
    return f"{name}({', '.join(arguments)})" if arguments else name


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The shortest ends of keys that tell them apart."""
    made = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        others = [other for other in keys if other != key]
        made[key] = next((one for one in ends if not any(f".{other}".endswith(f".{one}") for other in others)), key)
    return made
