"""Writes hyper-parameters and figures to the loggers of a run.

Loggers may come from Fabric or either distribution of Lightning, so they are recognised by attributes, not by class.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

SEED = "seed_everything"
# columns of TensorBoard's page HParams by their keys, in alphabetical order, as it sorts them; with one more, the
# accuracy would be outside of a window of 1280 pixels
COLUMNS = {"method": "Method", "data/partitioner/alpha": "alpha", "model/optimizer/lr": "learning rate", SEED: "seed"}


def experiment(logger: Any) -> Any:
    """Return the ``experiment`` of a logger; None without one."""
    return getattr(logger, "experiment", None)


def is_tensorboard(logger: Any) -> bool:
    """Return whether a logger writes TensorBoard events."""
    return hasattr(experiment(logger), "add_custom_scalars")


def log_hyperparams(logger: Any, params: Mapping[str, Any]) -> None:
    """Log hyper-parameters, except to TensorBoard, which :func:`add_to_page` serves."""
    if not is_tensorboard(logger):
        with suppress(NotImplementedError):  # Fabric's CSVLogger does not support them
            logger.log_hyperparams(dict(params))


def add_to_page(
    logger: Any, params: Mapping[str, Any], shown: Mapping[str, Any], metrics: Mapping[str, float], round_: int
) -> None:
    """Log hyper-parameters to TensorBoard, with the metrics by which its page HParams compares runs.

    The metrics have been logged; ``log_hyperparams`` would log a second point of the same round.

    Args:
        logger: the logger.
        params: all hyper-parameters.
        shown: the hyper-parameters of the page, which keeps the first values of a run, so that they must not change
            when the run resumes in its folder. :data:`COLUMNS` are its columns.
        metrics: the metrics of the last round.
        round_: the last round.
    """
    if not is_tensorboard(logger):
        return
    from torch.utils.tensorboard.summary import hparams

    logger.log_hyperparams(dict(params), {})  # for the file hparams.yaml of Lightning's logger
    if metrics:
        values = page_values(shown)
        ranked = {tag: metrics[tag] for tag in sorted(metrics, key=_rank)}
        of_columns = {name: values[name] for name in COLUMNS.values() if name in values}
        columns, *_ = hparams(of_columns, ranked)
        for summary in (columns, *hparams(values, ranked)[1:]):
            experiment(logger).file_writer.add_summary(summary, round_)


def page_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters for the page HParams, which shows texts, and numbers with five digits.

    Booleans are texts, since the page would show 0.0000 or 1.0000, and so is the seed, which may be longer.
    """
    values = {}
    for key, value in {**by_path(params), "method": method_text(params)}.items():
        is_text = isinstance(value, bool) or key == SEED
        values[COLUMNS.get(key, key)] = str(value) if is_text else value
    return values


def by_path(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return numbers, booleans and texts by the path of their keys; other values as text.

    A class and its arguments share the path of the key: ``model/optimizer`` and ``model/optimizer/lr``.
    """
    values: dict[str, Any] = {}
    for key, value in params.items():
        path = prefix.rstrip("/") if key in ("class_path", "init_args") and prefix else f"{prefix}{key}"
        if isinstance(value, Mapping):
            values |= by_path(value, f"{path}/")
        else:
            values[path] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return values


def method_text(params: Mapping[str, Any]) -> str:
    """Return a run's methods with their arguments on one line, such as ``FedUV(mu=0.5)``."""
    methods = params.get("method")
    texts = []
    for name, arguments in methods.items() if isinstance(methods, Mapping) else ():
        text = ", ".join(f"{key}={value}" for key, value in arguments.items() if value is not None)
        texts.append(f"{name}({text})")
    return ", ".join(texts) or "FedAvg"


def _rank(tag: str) -> tuple[int, bool, bool, str]:
    """Sort key of a metric: test, validation, round, training; accuracy and loss first."""
    kinds = ("test", "val", "round", "train")
    kind = next((place for place, name in enumerate(kinds) if tag.startswith(name)), len(kinds))
    return kind, not tag.endswith("accuracy"), not tag.endswith("loss"), tag


def log_figure(logger: Any, name: str, figure: Any, round_: int) -> None:
    """Log a Matplotlib figure to a logger that supports images."""
    writer = experiment(logger)
    if hasattr(writer, "add_figure"):  # TensorBoard
        writer.add_figure(name, figure, round_)
    elif hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image(key=name, images=[figure], step=round_)
    elif hasattr(writer, "log_figure") and hasattr(logger, "run_id"):  # MLflow
        writer.log_figure(logger.run_id, figure, f"figures/{name}/{round_}.png")
    elif hasattr(writer, "log_figure"):  # Comet
        writer.log_figure(figure_name=name, figure=figure, step=round_)
