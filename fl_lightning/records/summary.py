"""What is told of a run in few words: which of its metrics, the best of them, and in how many digits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

# words in the name of a metric of which less is better, and of which more is; the latter lie between 0 and 1
LESS = ("loss", "error", "mse", "mae", "perplexity")
MORE = ("accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "dice", "iou")

# metrics of callbacks that are all shares
OF_SHARES = ("per_class/", "personal/", "scores/")


def has_word(name: str, words: Sequence[str]) -> bool:
    """Whether one of the words is a part of a metric's name, as in ``test_f1`` or ``test/MulticlassAccuracy``."""
    parts = re.findall("[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*", name)
    return any(part.lower() in words for part in parts)


def tagged(phase: str, name: str) -> str:
    """``phase/name``; a name that already begins with its phase is kept as it is."""
    return name if name.startswith((f"{phase}/", f"{phase}_")) else f"{phase}/{name}"


def is_defined(tag: str, value: float) -> bool:
    """Whether a mean takes a metric's value: nan, which stands for none, is left out, but for that of a loss."""
    return not math.isnan(value) or "loss" in re.split("[/_]", tag)


def best(history: Sequence[Mapping[str, float]], name: str) -> tuple[str, str]:
    """The best value of a metric, and its round; dashes where best has no meaning."""
    if not has_word(name, (*LESS, *MORE)):
        return "-", "-"
    sign = 1 if has_word(name, LESS) else -1
    value, round_ = min((sign * row[name], row["round"]) for row in history if name in row)
    return told(name, sign * value), str(int(round_))


def final(history: Sequence[Mapping[str, float]], name: str) -> str:
    """The value of a metric in the last round that has it; empty where none has."""
    return next((told(name, row[name]) for row in reversed(history) if name in row), "")


def names_to_show(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that a line has room for: the first of the test and of the validation data, and the training loss."""
    others = [*of_phase("val", metrics)[:2], *(["train/loss"] if "train/loss" in metrics else [])]
    return list(dict.fromkeys([*final_names(metrics)[:4], *others]))


def final_names(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that tell how a run ended: all that was logged of the test data, or else of the validation data."""
    return of_phase("test", metrics) or of_phase("val", metrics)


def of_phase(phase: str, metrics: Mapping[str, float]) -> list[str]:
    """What was logged of a phase: accuracy and loss first, then what else the module logs."""
    usual = [name for name in (f"{phase}/accuracy", f"{phase}/loss") if name in metrics]
    return [*usual, *(name for name in metrics if tagged(phase, name) == name and name not in usual)]


def told(name: str, value: float) -> str:
    """A metric as it is shown: shares, such as an accuracy or F1, in percent."""
    return f"{100 * value:.2f} %" if is_share(name) and 0 <= value <= 1 else few_digits(value)


def is_share(name: str) -> bool:
    """Whether a metric is a share by its name, such as an accuracy or F1."""
    return name.startswith(OF_SHARES) or (has_word(name, MORE) and not has_word(name, LESS))


def few_digits(value: float) -> str:
    """A number with four digits after the point, or as many in all."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def aligned(lines: Sequence[Sequence[object]]) -> str:
    """Lines of cells in columns, flush right; a column in which only the first line has an entry is left out."""
    texts = [[str(cell) for cell in line] for line in lines]
    used = [i for i in range(len(texts[0])) if any(line[i] for line in texts[1:])]
    widths = {i: max(len(line[i]) for line in texts) for i in used}
    return "\n".join("  ".join(line[i].rjust(widths[i]) for i in used) for line in texts)
