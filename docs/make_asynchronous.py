"""Make docs/asynchronous.md, the page on asynchronous federation, and its figures.

python docs/make_asynchronous.py [--output FOLDER]

Accuracies come from the stored cells of ``experiments/asynchronous/suite.yaml``. Times and stalenesses are a
function of the seed and the config, and are computed again, without training. The text is in its ``page.md.j2``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, takewhile
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fl_lightning.bench import load_suite  # noqa: E402, found through the path above
from fl_lightning.bench.cells_csv import stored_cells  # noqa: E402
from fl_lightning.core.clock import MICROSECONDS, Buffered, Clock, ServerStep  # noqa: E402
from fl_lightning.core.sampling import UniformSampler  # noqa: E402
from fl_lightning.core.systems import SystemOutcome  # noqa: E402
from fl_lightning.plotting.drawing import Curve, Draw, bar_style, bars, curves, in_style  # noqa: E402
from fl_lightning.plotting.figures import laid_out  # noqa: E402
from fl_lightning.plotting.style import LIGHT  # noqa: E402

FILES = ("suite.yaml", "asynchronous-suite.cells.csv", "page.md.j2")
SUITE, CELLS, PAGE = (ROOT / "experiments" / "asynchronous" / name for name in FILES)
# percents to which the seconds are counted; seconds between two points of a curve, and in the picture of the schedule
TARGETS, EVERY, SHOWN = (80, 90), 10, 60
# stalenesses with a colour of their own; the last is for all larger ones
COLOURS = 4


@dataclass(frozen=True)
class Course:
    """The simulated course of a run: the end of each round in seconds, and what an asynchronous server uses in it."""

    seconds: Sequence[float]
    steps: Sequence[ServerStep] = ()

    @property
    def staleness(self) -> list[int]:
        """The staleness of all updates."""
        return [number - visit.version for number, step in enumerate(self.steps) for visit in step.visits]


def course_of(config: Mapping[str, Any], seed: int) -> Course:
    """Compute the course of a cell from its config."""
    trainer, number = config["trainer"], config["data"]["init_args"]["num_clients"]
    clock, sampler, limit = Clock(**trainer["clock"]["init_args"]), UniformSampler(), trainer["max_seconds"]
    work = trainer["local_steps"]
    if "asynchronous" not in trainer:
        cohorts = (sampler(seed, round_, number, trainer["cohort_size"]) for round_ in count())
        longest = (max(clock.duration(seed, k, r, work, 0) for k in cohort) for r, cohort in enumerate(cohorts))
        ends = (time / MICROSECONDS for time in accumulate(longest))
        return Course([*takewhile(lambda end: end <= limit, ends)])

    def plan_visit(k: int, visit: int, start: int) -> tuple[int, SystemOutcome]:
        return clock.duration(seed, k, visit, work, 0), SystemOutcome()

    server = Buffered(**trainer["asynchronous"]["init_args"])
    schedule = server.schedule(seed, sampler, plan_visit, lambda version: range(number))
    steps = [*takewhile(lambda step: step.time <= limit * MICROSECONDS, schedule)]
    return Course([step.time / MICROSECONDS for step in steps], steps)


def visits_of(course: Course, number: int) -> Draw:
    """Return the picture of a schedule: a row for each client, a bar for each visit, a line for each step."""

    def draw(axes: Axes) -> None:
        for step_number, step in enumerate(course.steps):
            if step.time > SHOWN * MICROSECONDS:
                break
            axes.axvline(step.time / MICROSECONDS, color=LIGHT["quiet"], linewidth=0.8, zorder=1)
            for visit in step.visits:
                style = bar_style(min(step_number - visit.version, COLOURS - 1))
                start, end, used = (time / MICROSECONDS for time in (visit.started, visit.ended, step.time))
                axes.barh(visit.client, end - start, 0.7, start, zorder=2, **style)
                axes.hlines(visit.client, end, used, color=style["facecolor"], linewidth=1.2)
        for staleness in range(COLOURS):
            label = f"staleness {staleness}" if staleness < COLOURS - 1 else f"{staleness} or more"
            axes.barh(0, 0, label=label, **bar_style(staleness))
        axes.set(xlim=(0, SHOWN), ylim=(number - 0.5, -0.5), xlabel="simulated seconds", ylabel="client")
        axes.set_yticks(range(number))
        axes.grid(visible=False)

    return draw


def accuracy_at(values: Mapping[int, float], course: Course, second: float) -> float:
    """Return the accuracy in percent of the last evaluation up to a second; nan before the first."""
    done = [accuracy for round_, accuracy in sorted(values.items()) if course.seconds[round_] <= second]
    return 100 * done[-1] if done else float("nan")


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and standard deviation as text."""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def figures_and_rows() -> tuple[dict[str, Draw], dict[str, Any]]:
    """Return the drawings by name, and the values of the page."""
    suite = load_suite(SUITE)
    cells, stored = stored_cells(CELLS, suite)
    courses = defaultdict[str, list[tuple[Course, Mapping[int, float]]]](list)
    for cell in cells:
        course, result = course_of(cell.config, cell.seed), stored[cell.digest]
        if abs(course.seconds[-1] - result.metrics["clock/seconds"]) > 1e-6:
            raise SystemExit(f"{cell.name}: the run ended at {result.metrics['clock/seconds']} s")
        courses[cell.labels["method"]].append((course, result.values))
    trainer, number = cells[0].config["trainer"], cells[0].config["data"]["init_args"]["num_clients"]
    limit, lines, rows, shares = trainer["max_seconds"], [], [], []
    grid = np.arange(EVERY, limit + 1, EVERY)
    for place, (method, runs) in enumerate(courses.items()):
        accuracies = [[accuracy_at(values, course, second) for second in grid] for course, values in runs]
        lines.append(Curve(place, np.mean(accuracies, 0), method, grid))
        staleness = [age for course, _ in runs for age in course.staleness]
        row = [method, f"{statistics.fmean(len(course.seconds) for course, _ in runs):.0f}"]
        updates = [len(course.staleness) or len(course.seconds) * trainer["cohort_size"] for course, _ in runs]
        row += [f"{statistics.fmean(updates):.0f}", f"{statistics.fmean(staleness or [0]):.2f}"]
        for target in TARGETS:
            firsts = []
            for course, values in runs:
                reached = [round_ for round_, accuracy in sorted(values.items()) if 100 * accuracy >= target]
                firsts += [course.seconds[reached[0]]] if reached else []
            row.append(spread(firsts, 0) if len(firsts) == len(runs) else f"{len(firsts)} of {len(runs)} runs")
        ends = []
        for course, values in runs:
            last = [100 * accuracy for round_, accuracy in values.items() if course.seconds[round_] > limit - 60]
            ends.append(statistics.fmean(last))
        rows.append([*row, spread(ends)])
        if staleness:
            numbers = Counter(staleness)
            shares.append((place, np.array([numbers[age] for age in range(max(numbers) + 1)]) / len(staleness), method))
    most = max(len(heights) for _, heights, _ in shares)
    padded = [(place, np.pad(100 * heights, (0, most - len(heights))), name) for place, heights, name in shares]
    factors = []
    clock = Clock(**trainer["clock"]["init_args"])
    for seed in suite.seeds:
        durations = [clock.duration(seed, k, 0, 1, 0) for k in range(number)]
        factors.append(max(durations) / min(durations))
    drawings = {
        "accuracy": curves(lines, xlabel="simulated seconds", title="test accuracy in %"),
        "staleness": bars(padded, [*map(str, range(most))], xlabel="staleness", title="updates in %"),
        "schedule": visits_of(courses["FedBuff"][0][0], number),
    }
    slowest = f"{min(factors):.0f} to {max(factors):.0f}"
    (protocol,) = suite.notes
    facts = {"rows": rows, "seeds": len(suite.seeds), "shown": SHOWN, "slowest": slowest, "targets": TARGETS}
    return drawings, {**facts, "protocol": protocol}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the page and its figures")
    folder = parser.parse_args().output
    drawings, facts = figures_and_rows()
    figures = folder / "figures" / "asynchronous"
    figures.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings.items():
        figure = laid_out([draw], size=(7.4, 4.2) if name == "schedule" else (6.0, 3.2))
        figure.set_facecolor(LIGHT["card"])
        # the letters look alike everywhere, and equal pictures are equal files
        with in_style(), rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
            figure.savefig(figures / f"{name}.svg", transparent=False, metadata={"Date": None})
    (folder / "asynchronous.md").write_text(jinja2.Template(PAGE.read_text()).render(facts).rstrip() + "\n")


if __name__ == "__main__":
    main()
