"""What is told of a run in few words: which of its metrics, the best of them, and in how many digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# words in the name of a metric of which less is better, and of which more is
LESS, MORE = ("loss", "error", "mse", "mae", "perplexity"), ("accuracy", "auc", "auroc", "f1", "precision", "recall")


def tagged(phase: str, name: str) -> str:
    """``phase/name``; a name that already begins with its phase is kept as it is."""
    return name if name.startswith((f"{phase}/", f"{phase}_")) else f"{phase}/{name}"


def best(history: Sequence[Mapping[str, float]], name: str) -> tuple[str, str]:
    """The best value of a metric, and its round as the lines count them, from 1; dashes where best has no meaning."""
    words = name.replace("/", "_").split("_")
    if not any(word in words for word in (*LESS, *MORE)):
        return "-", "-"
    sign = 1 if any(word in words for word in LESS) else -1
    value, round_ = min((sign * row[name], row["round"]) for row in history if name in row)
    return few_digits(sign * value), str(int(round_) + 1)


def names_to_show(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that a line has room for: accuracy and loss of each phase, or what there is of its data."""
    others = [name for name in ("val/accuracy", "val/loss", "train/loss") if name in metrics]
    return list(dict.fromkeys([*final_names(metrics)[:4], *others]))


def final_names(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that tell how a run ended: accuracy and loss, or else all of the test or the validation data."""
    usual = [name for name in ("test/accuracy", "test/loss") if name in metrics]
    of_test, of_val = ([name for name in metrics if tagged(phase, name) == name] for phase in ("test", "val"))
    return usual or of_test or of_val


def few_digits(value: float) -> str:
    """A metric with four digits after the point, or as many in all."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
