"""The figures of what callbacks have measured and left in files of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fl_lightning.errors import printable
from fl_lightning.report.curves import averaged, last_profile
from fl_lightning.report.figures import HEIGHT, Card, Panel, bars, curves, heat, heat_margins, points, room
from fl_lightning.report.names import PANELS, band, legend_of, named, number_of, titled
from fl_lightning.report.run import PLAN, Run
from fl_lightning.report.sections import Group, Section

# of singular values; those below this share of the largest are rounding errors
VISIBLE = 1e-12
# more bars side by side cannot be told apart, nor can more names below them
BARS, NAMES = 4, 24
# values of a map in its file of data; values that are drawn; kinds of points that are told apart
MOST, LARGEST_DRAWN, KINDS = 10_000, 1_000_000, 256
# the margins of what has no numbers along its axes
BARE = (0.1, 0.1, 0.1, 0.3)
Reduce = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Spec:
    """How an array is drawn.

    Args:
        kind: ``course`` against the rounds; or, of the last measurement, ``spectrum`` or ``profile`` as curves over an
            axis, ``bars`` over it, a ``map`` for each method, or ``points``.
        label: what its values are.
        axis: what lies along its axis, or along the two of a map.
        reduce: makes of an entry what is drawn of it.
        names: the array that has the names along the axis.
        percent: whether its values are shares, which are shown in percent.
    """

    kind: str
    label: str
    axis: str = "index"
    reduce: Reduce = lambda values: values
    names: str = ""
    percent: bool = False


def over(axis: int) -> Reduce:
    """The mean over an axis, of what is finite."""

    def reduce(values: np.ndarray) -> np.ndarray:
        finite = np.isfinite(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(finite, values, 0).sum(axis) / finite.sum(axis)

    return reduce


def off_diagonal(values: np.ndarray) -> np.ndarray:
    """The mean of the values ``(L, m, m)`` between two, without those of one with itself."""
    apart = ~np.eye(values.shape[-1], dtype=bool)
    return over(1)(values[:, apart])


def diagonal(values: np.ndarray) -> np.ndarray:
    """The mean of the diagonals of ``(P, k, k)``."""
    return over(1)(np.diagonal(values, axis1=1, axis2=2))


def descending(values: np.ndarray) -> np.ndarray:
    """Values from the largest to the smallest; nan comes last."""
    return -np.sort(-values)


OF_MODEL = "singular values of the classifier's weight"
OF_REPRESENTATION = "singular values of the covariance of the test representations"
GROUPS = ("majority", "minority", "missing")
BY_CLIENT = "client, the largest value first"
TITLES = {
    "spectra.npz": "Spectra",
    "layer_similarity.npz": "Similarity layer by layer",
    "layer_alignment.npz": "Alignment of consecutive layers",
    "drift.npz": "Drift in detail",
    "per_class.npz": "Accuracy by class",
    "personal.npz": "Accuracy by client",
    "deviation.npz": "Deviation bound",
    "embedding.npz": "Embedding of the representations",
}
SPECS: dict[str, dict[str, Spec]] = {
    "spectra.npz": {
        "classifier": Spec("spectrum", OF_MODEL),
        "representation": Spec("spectrum", OF_REPRESENTATION),
        "local_classifier": Spec("spectrum", f"{OF_MODEL}, mean of the local models", reduce=over(0)),
        "local_representation": Spec("spectrum", f"{OF_REPRESENTATION}, mean of the local models", reduce=over(0)),
    },
    "layer_similarity.npz": {
        "to_global": Spec("profile", "CKA of a client and the global model", "layer", over(1), "layers"),
        "between_clients": Spec("profile", "CKA of two clients", "layer", off_diagonal, "layers"),
        "between_rounds": Spec("profile", "CKA with the measurement before", "layer", names="layers"),
    },
    "layer_alignment.npz": {
        "global": Spec("profile", "alignment, global model", "pair of layers", diagonal, "pairs"),
        "local": Spec("profile", "alignment, local models", "pair of layers", diagonal, "pairs"),
    },
    "drift.npz": {
        "dissimilarity": Spec("course", "gradient dissimilarity"),
        "layer_dissimilarity": Spec("profile", "gradient dissimilarity", "layer", names="layers"),
        "layer_norms": Spec("profile", "norm of a client's change", "layer", over(1), "layers"),
        "layer_to_mean": Spec("profile", "cosine to the mean change", "layer", over(1), "layers"),
        "norms": Spec("profile", "norm of the change", BY_CLIENT, descending),
        "to_mean": Spec("profile", "cosine to the mean change", BY_CLIENT, descending),
        "pairwise": Spec("map", "cosine of two clients' changes", "client, client"),
    },
    "per_class.npz": {
        "before": Spec("bars", "local models", "class", over(0), percent=True),
        "after": Spec("bars", "after aggregation", "class", over(0), percent=True),
        "groups_before": Spec("bars", "local models", "group", over(0), ",".join(GROUPS), percent=True),
        "groups_after": Spec("bars", "after aggregation", "group", over(0), ",".join(GROUPS), percent=True),
        "confusion_after": Spec("map", "test examples", "true class, predicted class"),
    },
    "personal.npz": {
        "own": Spec("profile", "own test data", BY_CLIENT, descending, percent=True),
        "tuned": Spec("profile", "after fine-tuning", BY_CLIENT, descending, percent=True),
        "prototype": Spec("profile", "nearest prototype", BY_CLIENT, descending, percent=True),
        "domain": Spec("bars", "global model", "domain", names="domains", percent=True),
    },
    "deviation.npz": {
        "ratio": Spec("profile", "ratio to the bound", "class", over(0)),
        "ratio_calibrated": Spec("profile", "ratio to the calibrated bound", "class", over(0)),
        "own": Spec("profile", "cosine of the own row", "class", over(0)),
        "others": Spec("profile", "largest cosine of another row", "class", over(0)),
    },
    "embedding.npz": {"global": Spec("points", "t-SNE of the test representations")},
}
# what another callback may leave is drawn by the number of its axes
BY_AXES = {1: "course", 2: "profile", 3: "map"}
# axes of what is drawn of one measurement; the others are curves or bars
AXES = {"course": 0, "map": 2, "points": 2}


def measured(section: Section, setting: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """The figures of all files of measurements of a setting, each with its heading."""
    for file in files_of(section.at(setting)):
        specs = specs_of(section.at(setting), file)
        for kind in dict.fromkeys(spec.kind for spec in specs.values()):
            of_kind = {name: spec for name, spec in specs.items() if spec.kind == kind}
            for card in CARDS[kind](section, setting, file, of_kind):
                name = named(prefix, setting, f"{file.removesuffix('.npz')}-{card.name}")
                heading = TITLES.get(file, f"Measured in {printable(file)}")
                yield heading, Card(**{**vars(card), "name": name, "title": titled(card.title or heading, setting)})


def files_of(groups: Sequence[Group]) -> list[str]:
    """The names of the files of measurements of some groups, the known ones first."""
    found = {name for group in groups for run in group.runs.values() for name in run.files(".npz")} - {PLAN}
    return sorted(found, key=lambda name: (list(TITLES).index(name) if name in TITLES else len(TITLES), name))


def specs_of(groups: Sequence[Group], file: str) -> dict[str, Spec]:
    """How the arrays of a file are drawn."""
    arrays = [one for group in groups for run in group.runs.values() if (one := run.arrays(file)) is not None]
    depths = {name: values.ndim for one in arrays for name, values in one.values.items()}
    if file in SPECS:
        return {name: spec for name, spec in SPECS[file].items() if name in depths}
    return {name: Spec(BY_AXES[depth], name) for name, depth in depths.items() if depth in BY_AXES}


def drawn(values: np.ndarray, spec: Spec) -> np.ndarray | None:
    """What is drawn of an entry; None where it has other axes than that needs, or nothing, or too much."""
    try:
        made = spec.reduce(values)
    except (ValueError, IndexError):
        return None
    fits = made.ndim == AXES.get(spec.kind, 1) and (spec.kind != "points" or made.shape[1] == 2)
    return made if fits and 0 < made.size <= LARGEST_DRAWN else None


def not_drawn(run: Run) -> Iterator[str]:
    """That what should be drawn of a run's measurements cannot be."""
    for file in run.files(".npz"):
        arrays = run.arrays(file)
        if arrays is None:
            continue
        for name, values in arrays.values.items():
            by_axes = {name: Spec(BY_AXES[values.ndim], name)} if values.ndim in BY_AXES else {}
            spec = SPECS.get(file, by_axes).get(name)
            if spec is not None and drawn(values[-1], spec) is None:
                yield f"{printable(file)}: {name} of shape {values.shape} is not drawn"
        for name in SPECS.get(file, ()):
            if name in arrays.others:
                yield f"{file}: {name} of shape {arrays.others[name]} is not drawn"


def last_of(section: Section, setting: str, file: str, name: str, spec: Spec) -> list[tuple[Group, int, np.ndarray]]:
    """What is drawn of the last measurement of each group, with its round; without those that have nothing."""
    found = []
    for group in section.at(setting):
        made = last_profile(group, file, name, partial(drawn, spec=spec))
        if made is not None:
            values = made[1] * (100.0 if spec.percent else 1.0)
            if np.isfinite(values).any():
                found.append((group, made[0], values))
    return found


def names_of(group: Group, file: str, spec: Spec, length: int) -> list[str]:
    """The names along an axis; numbers where there are none."""
    arrays = group.first.arrays(file)
    given = spec.names.split(",") if "," in spec.names else arrays.names.get(spec.names, []) if arrays else []
    return given if len(given) == length else [str(at) for at in range(length)]


def with_unit(spec: Spec) -> str:
    """What the values of an array are, with their unit."""
    return f"{spec.label}, %" if spec.percent else spec.label


def when(rounds: Sequence[int]) -> str:
    """The rounds of some measurements, in words."""
    low, high = min(rounds), max(rounds)
    return f"round {low}" if low == high else f"rounds {low} to {high}"


def lines_cards(section: Section, setting: str, file: str, specs: dict[str, Spec]) -> Iterator[Card]:
    """Curves over an axis, an array in each drawing."""
    by_axis: dict[str, dict[str, Spec]] = {}
    for name, spec in specs.items():
        by_axis.setdefault("" if spec.kind == "spectrum" else spec.axis, {})[name] = spec
    for axis, some in by_axis.items():
        panels, rows, rounds = [], [], []
        shown: dict[str, Group] = {}
        for name, spec in some.items():
            found = last_of(section, setting, file, name, spec)
            if not found:
                continue
            spectrum = spec.kind == "spectrum"
            places = names_of(found[0][0], file, spec, max(len(values) for *_, values in found))
            lines = [
                (number_of(section, group), np.arange(len(values)), visible(values) if spectrum else values, None)
                for group, _, values in found
            ]
            draw = curves(
                lines,
                log=spectrum,
                ticks=places if spec.names else None,
                xlabel=spec.axis,
                ylabel="singular value" if spectrum else with_unit(spec),
                title=heading_of(spec) if spectrum else "",
            )
            margins = (0.72, max(0.48, room(places)) if spec.names else 0.48, 0.12, 0.3 if spectrum else 0.14)
            panels.append(Panel(draw, f"{spec.label} by {spec.axis}", margins=margins))
            rows += [
                [name, group.line, round_, places[at], float(one)]
                for group, round_, values in found
                for at, one in enumerate(values)
            ]
            shown |= {group.line: group for group, *_ in found}
            rounds += [round_ for _, round_, _ in found]
        if panels:
            what = "spectrum" if not axis else "by-" + axis.split(",")[0]
            title = "" if len(by_axis) == 1 else f"{TITLES.get(file, file)}, by {axis.split(',')[0]}"
            caption = f"The last measurement, {when(rounds)}, as the mean over the seeds."
            caption += " The scale is logarithmic; values that are rounding errors are left out." if not axis else ""
            legend = legend_of(section, list(shown.values()))
            head = ("what", "curve", "round", axis.split(",")[0] or "index", "value")
            yield Card(what, title, caption, panels, legend, head, rows)


def visible(values: np.ndarray) -> np.ndarray:
    """Singular values without those that are rounding errors."""
    return np.where(values > VISIBLE * np.nanmax(values), values, np.nan)


def heading_of(spec: Spec) -> str:
    """The title of a drawing of a spectrum."""
    what = "classifier" if OF_MODEL in spec.label else "representation"
    return f"{what}, mean of the local models" if "local" in spec.label else what


def bars_cards(section: Section, setting: str, file: str, specs: dict[str, Spec]) -> Iterator[Card]:
    """Bars over an axis, an array in each drawing; as curves where there are too many names."""
    panels, rows, rounds = [], [], []
    for name, spec in specs.items():
        found = last_of(section, setting, file, name, spec)
        if not found:
            continue
        length = max(len(values) for *_, values in found)
        if length > NAMES:
            yield from lines_cards(section, setting, file, {name: spec})
            continue
        places = names_of(found[0][0], file, spec, length)
        below = max(room(places), 0.48) if max(map(len, places)) > 4 else 0.48
        for start in range(0, len(found), BARS):
            some = found[start : start + BARS]
            heights = [(number_of(section, group), values) for group, _, values in some]
            draw = bars(heights, places, xlabel=spec.axis, ylabel=with_unit(spec))
            legend = [(at, section.lines[at]) for at, _ in heights]
            panels.append(Panel(draw, f"{spec.label} by {spec.axis}", HEIGHT, legend, (0.72, below, 0.12, 0.14)))
        rows += [
            [name, group.line, round_, places[at], float(one)]
            for group, round_, values in found
            for at, one in enumerate(values)
        ]
        rounds += [round_ for _, round_, _ in found]
    if panels:
        caption = (
            f"The last measurement, {when(rounds)}, as the mean over the clients that were measured and the seeds."
        )
        yield Card("bars", "", caption, panels, (), ("what", "curve", "round", "place", "value"), rows)


def map_cards(section: Section, setting: str, file: str, specs: dict[str, Spec]) -> Iterator[Card]:
    """A matrix for each method, all of them on one scale."""
    for name, spec in specs.items():
        found = last_of(section, setting, file, name, spec)
        if not found:
            continue
        finite = np.concatenate([values[np.isfinite(values)] for *_, values in found])
        limits = (float(finite.min()), float(finite.max()))
        axes = spec.axis.split(", ") if ", " in spec.axis else ["row", "column"]
        panels = []
        for group, _, values in found[:PANELS]:
            draw = heat(values, spec.label, limits=limits, title=group.line, ylabel=axes[0], xlabel=axes[1])
            panels.append(Panel(draw, f"{spec.label}, {group.line}", margins=heat_margins()))
        rows = [
            [group.line, round_, i, j, float(values[i, j])]
            for group, round_, values in found
            if values.size <= MOST
            for i, j in np.ndindex(*values.shape)
        ]
        left = f" The first {PANELS} of {len(found)} are drawn." if len(found) > PANELS else ""
        caption = f"The last measurement, {when([one[1] for one in found])}, as the mean over the seeds.{left}"
        title = f"{TITLES.get(file, file)}: {spec.label}"
        yield Card(name, title, caption, panels, (), ("curve", "round", *axes_names(axes), "value"), rows)


def axes_names(axes: Sequence[str]) -> tuple[str, str]:
    """Names of two columns, which are not the same."""
    return (axes[0], axes[1] if axes[0] != axes[1] else f"other {axes[1]}")


def course_cards(section: Section, setting: str, file: str, specs: dict[str, Spec]) -> Iterator[Card]:
    """Numbers against the rounds, an array in each drawing."""
    panels, rows, shown = [], [], {}
    for name, spec in specs.items():
        lines = []
        for group in section.at(setting):
            values = []
            for run in group.runs.values():
                arrays = run.arrays(file)
                if arrays is not None and name in arrays.values and arrays.values[name].ndim == 1:
                    pairs = zip(arrays.rounds[name].tolist(), arrays.values[name].tolist(), strict=True)
                    values.append(dict(pairs))
            one = averaged(values)
            if one is not None:
                lines.append((number_of(section, group), one.rounds, one.mean, one.deviation))
                numbers = zip(one.rounds.tolist(), one.mean.tolist(), one.n.tolist(), strict=True)
                rows += [[name, group.line, *three] for three in numbers]
                shown[group.line] = group
        if lines:
            panels.append(Panel(curves(lines, xlabel="round", ylabel=spec.label), f"{spec.label} against rounds"))
    if panels:
        caption, legend = band(section.at(setting)), legend_of(section, list(shown.values()))
        yield Card("course", "", caption, panels[:PANELS], legend, ("what", "curve", "round", "mean", "seeds"), rows)


def points_cards(section: Section, setting: str, file: str, specs: dict[str, Spec]) -> Iterator[Card]:
    """Points in the plane for each method, with the colour and the marker of their class."""
    for name, spec in specs.items():
        panels, rows = [], []
        for group in section.at(setting):
            arrays = group.first.arrays(file)
            places = None if arrays is None or name not in arrays.values else drawn(arrays.values[name][-1], spec)
            if arrays is None or places is None or not np.isfinite(places).any():
                continue
            labels = arrays.values.get("labels")
            kinds = labels[-1] if labels is not None and labels[-1].shape == places.shape[:1] else None
            if kinds is not None and not (np.isfinite(kinds).all() and len(np.unique(kinds)) <= KINDS):
                kinds = None
            panels.append(Panel(points(places, kinds, title=group.line), f"{spec.label}, {group.line}", margins=BARE))
            of = kinds if kinds is not None else np.zeros(len(places))
            rows += [[group.line, *map(float, place), int(kind)] for place, kind in zip(places, of, strict=True)]
        if panels:
            caption = "The last measurement of the smallest seed; each class has a colour and a marker."
            yield Card(name, "", caption, panels[:PANELS], (), ("curve", "x", "y", "class"), rows)


CARDS: dict[str, Callable[[Section, str, str, dict[str, Spec]], Iterator[Card]]] = {
    "course": course_cards,
    "spectrum": lines_cards,
    "profile": lines_cards,
    "bars": bars_cards,
    "map": map_cards,
    "points": points_cards,
}
