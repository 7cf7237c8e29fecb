"""What the loggers of a run take beside the metrics: the hyper-parameters, and figures.

A logger may be one of Fabric or of either distribution of Lightning, so it is known by what it has, not by its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

# TensorBoard's page HParams shows five columns until others are chosen
SHOWN_FIRST = ("methods", "coefficients", "data/partitioner/alpha", "model/optimizer/lr", "seed_everything")


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
    if metrics:
        ordered = {tag: metrics[tag] for tag in sorted(metrics, key=_rank)}
        columns, start, end = hparams({**flat(params), "coefficients": coefficients(params)}, ordered)
        for summary in (_shown_first(columns), start, end):
            experiment(logger).file_writer.add_summary(summary, round_)


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers, truth values and texts by the path of their keys; anything else as its text.

    A class has the path of its key, and so have its arguments: ``model/optimizer`` and ``model/optimizer/lr``.
    """
    values: dict[str, Any] = {}
    for key, value in params.items():
        path = prefix.rstrip("/") if key in ("class_path", "init_args") and prefix else f"{prefix}{key}"
        if isinstance(value, Mapping):
            values |= flat(value, f"{path}/")
        else:
            values[path] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return values


def coefficients(params: Mapping[str, Any]) -> str:
    """The methods of a run with their arguments on one line; empty for FedAvg.

    TensorBoard takes the columns of its page HParams from one run, so those of another run's methods would be missing.
    """
    methods = params.get("method")
    texts = []
    for name, given in methods.items() if isinstance(methods, Mapping) else ():
        arguments = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
        texts.append(f"{name}({arguments})")
    return ", ".join(texts)


def _rank(tag: str) -> tuple[int, bool, str]:
    """The place of a metric: test, validation, training; accuracy first. The page shows the first five."""
    phases = [phase for phase in ("test", "val", "train") if tag.startswith(phase)]
    return ("test", "val", "train").index(phases[0]) if phases else 3, not tag.endswith("accuracy"), tag


def _shown_first(columns: Any) -> Any:
    """The same description of the columns, in which those that tell runs apart are marked, so that they are shown."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = columns.value[0].metadata.plugin_data
    described = HParamsPluginData.FromString(content.content)
    for column in described.experiment.hparam_infos:
        column.differs = column.name in SHOWN_FIRST
    content.content = described.SerializeToString()
    return columns


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
