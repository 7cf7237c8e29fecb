"""What the loggers of a run take beside the metrics: the hyper-parameters, and figures.

A logger may be one of Fabric or of either distribution of Lightning, so it is known by what it has, not by its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def experiment(logger: Any) -> Any:
    """What the logger writes through; None where it has no such object."""
    return getattr(logger, "experiment", None)


def is_tensorboard(logger: Any) -> bool:
    """Whether a logger writes TensorBoard events."""
    return hasattr(experiment(logger), "add_custom_scalars")


def log_hyperparams(logger: Any, params: Mapping[str, Any]) -> None:
    """Give hyper-parameters to a logger."""
    with suppress(NotImplementedError):  # so does Fabric's CSVLogger say that it takes none
        logger.log_hyperparams(dict(params))


def compare_hyperparams(logger: Any, params: Mapping[str, Any], metrics: Mapping[str, float], round_: int) -> None:
    """Give hyper-parameters to a TensorBoard logger, with the metrics by which its page HParams compares runs.

    The metrics are logged already: given to ``log_hyperparams``, they would be a second point of the same round.
    """
    from torch.utils.tensorboard.summary import hparams

    logger.log_hyperparams(dict(params), {})  # for the file hparams.yaml of Lightning's logger
    for summary in hparams(flat(params), dict(metrics)) if metrics else ():
        experiment(logger).file_writer.add_summary(summary, round_)


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers, truth values and texts by the path of their keys; anything else as its text."""
    values: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}/")
        else:
            values[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return values


def log_figure(logger: Any, name: str, figure: Any, round_: int) -> None:
    """Give a figure of Matplotlib to a logger that takes images; nothing to one that does not."""
    writer = experiment(logger)
    if hasattr(writer, "add_figure"):  # TensorBoard
        writer.add_figure(name, figure, round_)
    elif hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image(key=name, images=[figure], step=round_)
    elif hasattr(writer, "log_figure") and hasattr(logger, "run_id"):  # MLflow
        writer.log_figure(logger.run_id, figure, f"figures/{name}/{round_}.png")
    elif hasattr(writer, "log_figure"):  # Comet
        writer.log_figure(figure_name=name, figure=figure, step=round_)
