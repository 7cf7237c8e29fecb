"""The parts of a config that matter to a comparison, and the names of runs that follow from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pandas as pd

from fl_lightning.bench.config_fragments import OF_METHOD, is_of_method, look_up, of_result
from fl_lightning.storage.hyperparameters import numbered
from fl_lightning.storage.results import FitResult

# keys that start or resume a run, or change a result only by rounding
NO_RESULT = re.compile(
    r"(ckpt_path|allow_changes|seed_everything"
    r"|trainer\.(threads_per_worker|deterministic|clients_per_step|accelerator|strategy|compile|channels_last)"
    r"|trainer\.(on_client_error|min_clients)"
    r"|data\.(.*\.)?(num_workers|pin_memory|prefetch_factor|persistent_workers|eval_batch_size))(\..*)?"
)
# callbacks of this package that change the result of a run
ACTING = ("EarlyStopping", "CCVR")
# arguments that distinguish data sets of one class; a folder is shown by its name
KEYS_APART = {
    **dict.fromkeys(("NpyImages", "ImageFolderImages"), ("root",)),
    **dict.fromkeys(("Synthetic", "SyntheticPerClass"), ("alpha", "beta")),
}
UNKNOWN = "unknown data set"
# keys that make a setting even if each method has a different value
OF_SETTING = re.compile(
    r"model|(data|model\.encoder|trainer\.(max_rounds|local_epochs|local_steps|participation|cohort_size|sampler))(\..*)?"
)


def class_of(value: Any) -> str:
    """Return the class name of an entry; empty for a plain value."""
    named = isinstance(value, Mapping) and "class_path" in value
    return exact(str(value["class_path"])).rsplit(".", 1)[-1] if named else ""


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that decides the result of a run, by dotted key, without the seed.

    The value of a key with a class is the class name, and the keys below it are its arguments: ``data.partitioner`` is
    ``Dirichlet`` and ``data.partitioner.alpha`` is 0.1.
    """
    parts = of_result(dict(config))
    trainer = parts.get("trainer")
    if isinstance(trainer, Mapping) and isinstance(trainer.get("callbacks"), list):
        parts["trainer"] = {**trainer, "callbacks": list(filter(may_act, trainer["callbacks"]))}
    return {key: value for key, value in items(parts) if not NO_RESULT.fullmatch(key)}


def may_act(callback: Any) -> bool:
    """Return whether a callback of a config may change a result, as a user's may."""
    return class_of(callback) in ACTING or not str(look_up(callback, "class_path")).startswith("fl_lightning.")


def items(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a nested config; a class appears by its name."""
    name = class_of(value)
    if name:
        yield key, name
        value = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    if isinstance(value, Mapping):
        for name, argument in value.items():
            yield from items(argument, f"{key}.{exact(str(name))}" if key else exact(str(name)))
    elif isinstance(value, list) and value and all(map(class_of, value)):
        for kind, entry in zip(numbered(map(class_of, value)), value, strict=True):
            yield from items(entry, f"{key}.{kind}")
    elif not (value is None or value == []):
        yield key, value


def config_text(value: Any) -> str:
    """Return a value of a config as a table shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(config_text, value)) if isinstance(value, list) else exact(str(value))


def exact(text: str) -> str:
    """Return a text, or its literal if it has control characters, so that different texts stay different."""
    return text if text.isprintable() else repr(text)


def data_set(config: Mapping[str, Any], recorded: str = UNKNOWN) -> str:
    """Return the name of the data set of a run, which a run without a config has ``recorded``."""
    datamodule: Any = config.get("data") or {}
    inner = look_up(datamodule, "init_args.datamodule") if class_of(datamodule) == "Partitioned" else None
    if class_of(inner):
        datamodule = inner
    name, arguments = class_of(datamodule), datamodule.get("init_args") or {}
    values = [arguments[key] for key in KEYS_APART.get(name, ()) if arguments.get(key) is not None]
    variant = ", ".join(PurePath(exact(str(value))).name for value in values)
    return f"{name} ({variant})" if variant else name or exact(recorded)


def max_rounds(config: Mapping[str, Any]) -> int | None:
    """Return the number of rounds of a config; None where it has none."""
    number = (config.get("trainer") or {}).get("max_rounds")
    return number if type(number) is int and number >= 0 else None


def method_names(config: Mapping[str, Any]) -> str:
    """Return the methods of a run and the class of its server optimizer; FedAvg without either."""
    methods = config.get("method") or []
    named = "+".join(filter(None, map(class_of, methods if isinstance(methods, list) else [methods]))) or "FedAvg"
    return ", server ".join(filter(None, [named, class_of(look_up(dict(config), "trainer.server_optimizer"))]))


# ------------------------------------------------------------------ several configs
def config_frame(settings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return configs as texts: a row for each, a column for each dotted key, and None where a config lacks the key."""
    texts = []
    for of_config in settings:
        texts.append({key: config_text(value) for key, value in of_config.items()})
    frame = pd.DataFrame(texts, range(len(texts)), dtype=object)
    return frame.where(frame.notna(), None)


def differing_keys(configs: pd.DataFrame) -> list[str]:
    """Return the keys in which configs differ, in order of appearance."""
    return [key for key in configs if configs[key].nunique(dropna=False) > 1]


def compact(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a config as texts in which each method, and the server optimizer, is one text with its arguments."""
    texts, compacted = {key: config_text(value) for key, value in settings.items()}, dict[str, str]()
    for key, text in texts.items():
        if not is_of_method(key):
            compacted[key] = text
        elif key in OF_METHOD or (key.startswith("method.") and key.count(".") == 1):
            arguments = [name for name in texts if name.startswith(f"{key}.")]
            pairs = [f"{name.removeprefix(f'{key}.')}={texts[name]}" for name in arguments]
            call = f"{text}({', '.join(pairs)})" if pairs else text
            of_methods = key if key in OF_METHOD else "method"
            compacted[of_methods] = " + ".join(filter(None, [compacted.get(of_methods), call]))
    return compacted


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest unambiguous end of each dotted key."""
    counts, ends_of = Counter[str](), dict[str, list[str]]()
    for key in keys:
        parts = key.split(".")
        ends_of[key] = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
    for ends in ends_of.values():
        counts.update(ends)
    return {key: next((end for end in ends if counts[end] == 1), key) for key, ends in ends_of.items()}


def telling(configs: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return keys that distinguish the configs as all ``keys`` do, without superfluous keys.

    Drops arguments of a class before the class itself, and keys of the data last.
    """
    needed_keys = sorted(keys, key=lambda key: (not key.startswith("data"), key.count(".")))
    num_configs = len(configs[needed_keys].drop_duplicates())
    for key in reversed(needed_keys):
        without = [name for name in needed_keys if name != key]
        if without and len(configs[without].drop_duplicates()) == num_configs:
            needed_keys = without
    return needed_keys


def name_configs(runs: Sequence[FitResult]) -> pd.DataFrame:
    """Return the ``setting`` of each run and its ``line``, the label of its curve, by the keys in which configs differ.

    The line is the method with its coefficients; the other keys make the setting. A key whose value follows from the
    method belongs to the method, such as a learning rate tuned for each method. Labels of a study, data, network and
    the amount of training always make a setting. Runs without a config are named by their folder.
    """
    axes = list(dict.fromkeys(axis for run in runs for axis in run.labels))
    # a study without methods compares the labels of its first axis
    by_label = "method" if "method" in axes else "".join(axes[:1])
    configs = config_frame([run.labels or run.settings for run in runs])
    lines = pd.Series([method_or_folder(run) for run in runs])
    lines = configs[by_label].combine_first(lines) if by_label in configs else lines
    for _, alike in configs.groupby(lines.copy()):
        of_method = [key for key in differing_keys(alike) if is_of_method(key)]
        for key, name in short_keys(of_method).items():
            lines[alike.index] += [f" {name}={value}" if value else "" for value in alike[key]]
    one_line, keys = lines.nunique() == 1, list[str]()
    # a run without a config, as from Python, is in no setting
    configs = configs[configs.notna().any(axis=1)]
    for key in differing_keys(configs):
        follows = configs.groupby(lines)[key].nunique(dropna=False).max() == 1
        if is_of_method(key) or key == by_label or (key == "data" and axes):
            continue
        if key in axes or OF_SETTING.fullmatch(key) or one_line or not follows:
            keys.append(key)
    settings = pd.Series("", lines.index)
    names = short_keys(keys)
    for key in telling(configs, keys) if keys else ():
        texts = [value or "not set" for value in configs[key]]
        settings[configs.index] += [f", {names[key]}={text}" for text in texts]
    settings = settings.str.removeprefix(", ")
    if one_line and not axes:  # the settings are compared
        settings, lines = pd.Series("", lines.index), settings.where(settings != "", lines)
    return pd.DataFrame({"setting": settings, "line": lines})


def method_or_folder(run: FitResult) -> str:
    """Return the methods of a run, or the name of its folder if it has no config."""
    if run.settings:
        return method_names(run.config)
    return run.name if run.run_dir is None else run.run_dir.parent.name


def with_setting(line: str, setting: str) -> str:
    """Return the label of a configuration: its line and its setting."""
    return ", ".join(filter(None, [line, setting]))
