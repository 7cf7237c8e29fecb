"""Selects and formats the metrics in summaries of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

# words in the names of metrics to minimise, and of metrics to maximise, which lie between 0 and 1
LESS = ("loss", "error", "mse", "mae", "perplexity")
MORE = ("accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "dice", "iou")

# prefixes of callbacks' metrics that are shares
OF_SHARES = ("per_class/", "personal/", "scores/")


def has_word(name: str, words: Sequence[str]) -> bool:
    """Return whether a metric's name contains one of the words, as in ``test_f1`` or ``test/MulticlassAccuracy``."""
    parts = re.findall("[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*", name)
    return any(part.lower() in words for part in parts)


def is_minimized(name: str) -> bool:
    """Return whether smaller values of a metric are better, judged by its name."""
    return "loss" in name or has_word(name, LESS)


def tagged(phase: str, name: str) -> str:
    """Return ``phase/name``, or a name that already begins with its phase unchanged."""
    return name if name.startswith((f"{phase}/", f"{phase}_")) else f"{phase}/{name}"


def is_defined(tag: str, value: float) -> bool:
    """Return whether a mean includes a metric's value: nan means undefined, except for a loss."""
    return not math.isnan(value) or "loss" in re.split("[/_]", tag)


def best(history: Sequence[Mapping[str, float]], name: str) -> tuple[str, str]:
    """Return the best value of a metric and its round; dashes if the metric has no direction, or is nan throughout."""
    sign = 1 if is_minimized(name) else -1
    values = []
    for row in history:
        if not math.isnan(row.get(name, math.nan)):
            values.append((sign * row[name], row["round"]))
    if not values or not (is_minimized(name) or has_word(name, MORE)):
        return "-", "-"
    value, round_ = min(values)
    return format_value(name, sign * value), str(int(round_))


def final(history: Sequence[Mapping[str, float]], name: str) -> str:
    """Return the value of a metric in the last round that has it; empty without such a round."""
    return next((format_value(name, row[name]) for row in reversed(history) if name in row), "")


def names_to_show(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of a line: the first test and validation metrics, and the training loss."""
    more_names = [*of_phase("val", metrics)[:2], *(["train/loss"] if "train/loss" in metrics else [])]
    return list(dict.fromkeys([*final_names(metrics)[:4], *more_names]))


def final_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the final metrics of a run: all of the test data, or else of the validation data."""
    return of_phase("test", metrics) or of_phase("val", metrics)


def of_phase(phase: str, metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of a phase, accuracy and loss first."""
    names = (f"{phase}/accuracy", f"{phase}/loss", *(name for name in metrics if tagged(phase, name) == name))
    return [name for name in dict.fromkeys(names) if name in metrics]


def format_value(name: str, value: float) -> str:
    """Format a metric; shares, such as accuracy and F1, in percent."""
    return f"{fixed(100 * value, 2)} %" if is_share(name) and 0 <= value <= 1 else few_digits(value)


def is_share(name: str) -> bool:
    """Return whether a metric is a share, such as accuracy or F1, judged by its name."""
    return name.startswith(OF_SHARES) or (has_word(name, MORE) and not is_minimized(name))


def in_percent(name: str, values: Iterable[float]) -> bool:
    """Return whether a metric is shown in percent: it is a share, and its finite values lie in [0, 1]."""
    return is_share(name) and all(0 <= value <= 1 for value in values if math.isfinite(value))


def few_digits(value: float) -> str:
    """Format a number with four decimals, or with four significant digits."""
    return fixed(value, 4) if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def fixed(value: float, decimals: int, sign: str = "") -> str:
    """Format a number with a fixed number of decimals, and with ``sign="+"`` always with its sign.

    A number that is 0 as it is shown has no sign.
    """
    text = f"{value:{sign}.{decimals}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def aligned(lines: Sequence[Sequence[object]]) -> str:
    """Align lines of cells in columns, flush right; columns without an entry below the first line are omitted."""
    texts = [[str(cell) for cell in line] for line in lines]
    columns = [i for i in range(len(texts[0])) if any(line[i] for line in texts[1:])]
    widths = {i: max(len(line[i]) for line in texts) for i in columns}
    return "\n".join("  ".join(line[i].rjust(widths[i]) for i in columns) for line in texts)
