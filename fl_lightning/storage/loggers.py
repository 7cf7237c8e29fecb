"""Writes hyper-parameters and figures to the loggers of a run.

Loggers may come from Fabric or either distribution of Lightning, so they are recognised by attributes, not by class.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

SEED = "seed_everything"
# first columns of TensorBoard's page HParams, which initially shows five
SHOWN_FIRST = (
    "methods",
    "coefficients",
    "data/partitioner/alpha",
    "model/optimizer/lr",
    SEED,
    "trainer/local_epochs",
    "trainer/local_steps",
    "trainer/participation",
)


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
        shown: the columns of the page, which keeps the first values of a run, so that they must not change when
            the run resumes in its folder.
        metrics: the metrics of the last round.
        round_: the last round.
    """
    if not is_tensorboard(logger):
        return
    from torch.utils.tensorboard.summary import hparams

    logger.log_hyperparams(dict(params), {})  # for the file hparams.yaml of Lightning's logger
    if metrics:
        for summary in hparams(page_columns(shown), {tag: metrics[tag] for tag in sorted(metrics, key=_rank)}):
            experiment(logger).file_writer.add_summary(summary, round_)


def page_columns(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the page HParams, which shows texts, and numbers with five digits.

    Booleans are texts, since the page would show 0.0000 or 1.0000, and so is the seed, which may be longer.
    """
    values = {**by_path(params), "coefficients": coefficients(params)}
    values.pop("method", None)  # an empty list; otherwise each argument has a column
    texts = {key: str(value) if isinstance(value, bool) or key == SEED else value for key, value in values.items()}
    return {key: texts[key] for key in (*SHOWN_FIRST, *texts) if key in texts}


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


def coefficients(params: Mapping[str, Any]) -> str:
    """Return the arguments of a run's methods on one line; with several methods, after each name; empty for FedAvg.

    TensorBoard takes the columns of its page HParams from one run, so other runs' methods would have no columns.
    """
    methods = params.get("method")
    texts = {}
    for name, arguments in methods.items() if isinstance(methods, Mapping) else ():
        texts[name] = ", ".join(f"{key}={value}" for key, value in arguments.items() if value is not None)
    return ", ".join(texts.values() if len(texts) == 1 else (f"{name}({text})" for name, text in texts.items()))


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
