"""``bench SUITE``: run the cells of a suite, or say how far they are. Nothing here imports torch."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from optuna.study import Study
from optuna.trial import TrialState

from fl_lightning.bench import Cell, Suite, load_suite
from fl_lightning.bench.cells_csv import finished_cells
from fl_lightning.bench.comparison import unequal_settings
from fl_lightning.bench.decide import cells_of_pairs, shown_cells, wanted_cells
from fl_lightning.bench.driver import Driver, open_study
from fl_lightning.bench.fragments import Fragment, config_digest, fragments_of, look_up
from fl_lightning.bench.readings import with_readings
from fl_lightning.bench.results import CellResult, changed_code
from fl_lightning.bench.runner import Runner
from fl_lightning.bench.study import (
    DATABASE_ERRORS,
    attributes_of,
    cause_of,
    check_study,
    default_url,
    exists,
    find_study,
    load_results,
    open_database,
    results_of,
)
from fl_lightning.bench.suite import file_part, first_seeds, selected_cells
from fl_lightning.bench.table import render, write_tables
from fl_lightning.bench.tune import AXIS, Search, SearchStudy, tuning_of
from fl_lightning.cli.entry_point import (
    COMMANDS,
    OneLineParser,
    end_with_status,
    find_own_classes,
    program,
    writing_into,
)
from fl_lightning.errors import UsageError, UsageErrors, clipped, require
from fl_lightning.yaml_files import read_yaml

# names that a line lists
MOST_NAMES = 5
LATER = "what is done is in the study; give the command again when the folder can be written to"


def bench_parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    parser = OneLineParser(prog=f"{program()} {command}", description=COMMANDS[command], allow_abbrev=False)
    parser.add_argument("suite", metavar="SUITE", help="YAML file of the suite")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the work to do, in (0, 1]")
    parser.add_argument("--storage", metavar="URL", help="database of the study; default: study.db in the output")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of all runs; default: runs/<suite>")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells side by side")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        default=[],
        help="cells that match one of these, such as method=FedCKA,alpha=0.1",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds of each cell")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, action="append", default=[], help="config that comes last, in all cells"
    )
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    if command == "bench":
        parser.add_argument("--dry-run", action="store_true", help="say how many cells there are, and what they take")
        parser.add_argument("--status", action="store_true", help="print the tables as far as they are, run nothing")
        parser.add_argument(
            "--load",
            metavar="FILE",
            type=Path,
            nargs="+",
            action="extend",
            default=[],
            help="files of cells, such as those of another machine, whose finished cells are not run again",
        )
        about = "what becomes of finished cells whose own code has changed since: run them anew, or keep them"
        parser.add_argument("--stale", choices=("run", "keep"), help=about)
        about = "add seeds to the pairs that are undecided, as the suite's key decide says"
        parser.add_argument("--until-decided", action="store_true", help=about)
        about = "most seeds of a pair, not above those of the suite's key decide"
        parser.add_argument("--max-seeds", type=int, metavar="N", help=about)
        parser.add_argument("--hours", type=float, metavar="H", help="hours after which no cell is begun any more")
        about = "run the readings of the suite's key open, and say which are consistent with what was published"
        parser.add_argument("--readings", action="store_true", help=about)
        parser.add_argument("--save", metavar="FOLDER", type=Path, help="write the tables and the cells there, too")
    else:
        parser.add_argument("--trials", type=int, metavar="N", help="number of trials")
    return parser


def main(args: Sequence[str]) -> None:
    """Run ``bench`` or ``tune``. Bad input ends it with one line and exit status 2, cells that failed with status 1.

    A signal ends it with the command that goes on, and status 128 + its number. It ends without a word where nobody
    reads its output any more.
    """
    find_own_classes()
    run = bench if args[0] == "bench" else tune

    def command() -> int:
        options = bench_parser(args[0]).parse_args(args[1:])
        suite = load_suite(options.suite)
        if getattr(options, "readings", False):
            hint = "the readings have the seeds of open.seeds: leave it out"
            require(not options.until_decided, "--until-decided", True, hint)
            suite = with_readings(suite)
        for name in ("jobs", "trials", "seeds", "max_seeds"):
            number = getattr(options, name, None)
            require(number is None or number >= 1, f"--{name.replace('_', '-')}", number, "give 1 or more")
        extra = [part for path in options.config for part in fragments_of(read_yaml(path), path)]
        output = options.output or Path("runs") / suite.name
        try:
            return run(options, suite, extra, output, args)
        except DATABASE_ERRORS as error:
            hint = "what is done is in it; see that it can be written to and that no process has locked it"
            raise UsageError(f"--storage: the database fails: {cause_of(error)}; {hint}, then go on") from error

    end_with_status(command)


def bench(
    options: argparse.Namespace, suite: Suite, extra: Sequence[Fragment], output: Path, args: Sequence[str]
) -> int:
    """Run the cells of a suite, or only say how far they are; returns the exit status."""
    most = most_seeds(options, suite)
    # the tables that are written are of the whole suite, whatever part of it is asked for
    number = max(len(suite.seeds), options.seeds or 0, suite.decide.max_seeds if suite.decide else 0)
    whole = suite.cells(options.scale, extra, first_seeds(suite.seeds, number))
    seeds = first_seeds(suite.seeds, most)
    within = [cell for cell in whole if cell.seed in seeds]
    cells = (partial(cells_of_pairs, suite) if options.until_decided else selected_cells)(within, options.only)
    url = options.storage or default_url(output)
    digests, known = {cell.digest for cell in whole}, {}
    for path in options.load:
        done = finished_cells(path, suite, whole)
        changed = changed_code(done) if options.stale == "run" else {}
        known[path] = {digest: result for digest, result in done.items() if digest not in changed}
    only_told = options.status or options.dry_run
    database = open_database(url) if exists(url) else None
    before = None if database is None else find_study(suite, database)
    if not options.status:
        warn_of_settings(suite, cells)
        scored = any("Scores" in str((cell.config.get("trainer") or {}).get("callbacks")) for cell in cells)
        hint = "no cell has the callback that logs them: add to the base trainer: {callbacks+: [{class_path: Scores}]}"
        shown = [table.show for table in suite.tables if table.show == "scores"]
        require(scored or not shown, f"{suite.path}: tables.show", "scores", hint)
    if not only_told and options.stale is None:
        # those of the study count before those of files
        check_code(cells, [*known.values(), results_of(before, cells)])
    if not options.status:
        results = results_of(before, cells)
        elsewhere = {digest for done in known.values() for digest in done}
        left = [cell for cell in cells if results[cell.digest].state != "done" and cell.digest not in elsewhere]
        check_configs(suite, left)
    if only_told and not known:
        return tell(suite, cells, whole, options, before)
    make_folder(output, "--output")
    if options.save is not None:
        make_folder(options.save, "--save")
    database = database or open_database(url)
    check_study(suite, database, None if options.storage else output)
    study = open_study(suite, database, cells, partial(wanted_cells, suite, cells) if options.until_decided else None)
    for path, done in known.items():
        loaded, strange = load_results(study, whole, done), len(done.keys() - digests)
        others = f"; {strange} others are no cells of this suite, or had another config or scale" if strange else ""
        say(f"{path}: {loaded} of {len(done)} finished cells are new here{others}")
    if only_told:
        return tell(suite, cells, whole, options, study)
    results = results_of(study, cells)
    if options.retry:
        study.forget(attributes_of(cell) for cell in cells if results[cell.digest].state == "failed")
    if options.stale == "run":
        changed = changed_code(results)
        study.forget((attributes_of(cell) for cell in cells if cell.digest in changed), anew=True)
    hours = math.inf if options.hours is None else options.hours
    wanted = study.wanted
    driver = Driver(
        lambda: [open_study(suite, database, cells, wanted)],
        suite.metric,
        output.resolve(),
        options.jobs,
        say,
        hours=hours,
    )
    driver.run()
    if status := why_ended(driver, args):
        return status
    # before they are printed: who reads them may close the pipe, as `head` does
    for key, folder in (("--output", output), *([("--save", options.save)] if options.save else [])):
        write_shown(suite, whole, study, key, folder)
    own = results_of(study, cells)
    print(render(suite, shown_cells(suite, cells, own), own))
    if driver.late:
        say(f"the {options.hours:g} hours are spent; go on: {again(args)}")
    failed = sum(result.state == "failed" for result in own.values())
    if failed:
        some = f"{failed} of {len(own)} cells failed"
        print(f"error: {some}; the table says why, and --retry runs them again", file=sys.stderr)
    return 1 if failed else 0


def check_configs(suite: Suite, cells: Sequence[Cell]) -> None:
    """Build the objects of each kind of cell, so that a config that is not valid is refused before any cell runs.

    Raises:
        UsageErrors: some cannot be built; one line for each reason.
    """
    kinds: dict[str, Cell] = {}
    for cell in cells:
        kinds.setdefault(kind_of(cell), cell)
    wrong = Runner().check(suite.metric, {cell.name: cell.fragments for cell in kinds.values()}) if kinds else {}
    if wrong:
        names = grouped((name.rpartition(",")[0] or name, reason) for name, reason in wrong.items())
        raise UsageErrors([f"{few(alike)}: {reason}" for reason, alike in names.items()])


def kind_of(cell: Cell) -> str:
    """The digest of a cell's config without its seed."""
    return config_digest({**cell.config, "seed_everything": None})


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """By the second of each pair, the list of the first ones, each once."""
    groups: dict[str, list[str]] = {}
    for name, text in pairs:
        if name not in groups.setdefault(text, []):
            groups[text].append(name)
    return groups


def few(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = len(names) - MOST_NAMES
    return "; ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def tell(
    suite: Suite, cells: Sequence[Cell], whole: Sequence[Cell], options: argparse.Namespace, study: Study | None
) -> int:
    """Print the tables so far, or the work that is left and its time by the cells that have run; returns 0."""
    results = results_of(study, cells)
    if options.save is not None:
        write_shown(suite, whole, study, "--save", make_folder(options.save, "--save"))
    if options.dry_run and options.stale == "run":
        results |= {digest: replace(results[digest], state="waiting") for digest in changed_code(results)}
    if options.status:
        print(render(suite, shown_cells(suite, cells, results), results))
        return 0
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(kind_of(cell), []).append(cell)
    lines, total, unknown = list[tuple[str, str]](), 0.0, 0
    for alike in kinds.values():
        left = sum(results[cell.digest].state in ("waiting", "running") for cell in alike)
        known = [seconds for cell in alike if (seconds := results[cell.digest].seconds) is not None]
        rounds = int(look_up(alike[0].config, "trainer.max_rounds", 10))
        text = f"{left} to run, {rounds} rounds" if left else "done"
        if left and known:
            seconds = sum(known) / len(known)
            total += left * rounds * seconds
            text += f" of {as_time(seconds)}"
        unknown += left if not known else 0
        lines.append((alike[0].name.rpartition(",")[0] or alike[0].name, text))
    for text, names in grouped(lines).items():
        print(f"{few(names)}: {text}")
    states = [result.state for result in results.values()]
    about = f"{'at most ' * options.until_decided}about {as_time(total / options.jobs)} with --jobs {options.jobs}"
    parts = [f"{len(states)} cells, {states.count('done')} done, {states.count('failed')} failed"]
    parts += [f"the others take {about}"] if total else []
    parts += [f"nothing is known of the time of {unknown}, of whose kind none has run"] if unknown else []
    print("; ".join(parts))
    return 0


def as_time(seconds: float) -> str:
    """A duration as text, such as ``1 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def write_shown(suite: Suite, whole: Sequence[Cell], study: Study | None, key: str, folder: Path) -> None:
    """Write the tables of the whole suite into the folder that ``key`` names."""
    results = results_of(study, whole)
    with writing_into(key, folder, LATER):
        write_tables(suite, shown_cells(suite, whole, results), results, folder)


def check_code(cells: Sequence[Cell], results: Sequence[Mapping[str, CellResult]]) -> None:
    """Refuse to go on where finished cells were run with another version of the user's own code, and say which.

    Args:
        cells: the cells that are asked for.
        results: results by digest, from several places; the last that are done count.

    Raises:
        UsageError: there are such cells.
    """
    done = {digest: result for place in results for digest, result in place.items() if result.state == "done"}
    changed = changed_code({cell.digest: done[cell.digest] for cell in cells if cell.digest in done})
    for cell in cells:
        if cell.digest in changed:
            say(f"{cell.name}: run with another version of {', '.join(changed[cell.digest])}")
    modules = ", ".join(sorted({name for names in changed.values() for name in names}))
    hint = f"{modules} changed since {len(changed)} finished cells were run; give run to run these anew, or keep to "
    require(not changed, "--stale", None, f"{hint}keep them, which the tables say")


def why_ended(driver: Driver, args: Sequence[str]) -> int:
    """Say what has ended the jobs before all was done; returns the exit status, 0 where nothing has."""
    if driver.error is not None:
        why = f"{type(driver.error).__name__}: {driver.error}"
        if isinstance(driver.error, DATABASE_ERRORS):
            why = f"the database fails: {cause_of(driver.error)}"
        print(f"error: {clipped(why)}; go on: {again(args)}", file=sys.stderr)
        return 1
    if driver.caught is not None:
        print(f"{driver.caught.name} stopped it; go on: {again(args)}", file=sys.stderr)
        return 128 + driver.caught
    return 0


def again(args: Sequence[str]) -> str:
    """The command that goes on."""
    return f"{program()} {shlex.join(arg for arg in args if arg != '--retry')}"


def most_seeds(options: argparse.Namespace, suite: Suite) -> int:
    """The number of seeds that cells may be asked for.

    Raises:
        UsageError: arguments do not fit each other, or the suite.
    """
    require(options.hours is None or options.hours > 0, "--hours", options.hours, "give a number above 0")
    if not options.until_decided:
        hint = "limits the seeds of --until-decided: give that too, or --seeds for a fixed number"
        require(options.max_seeds is None, "--max-seeds", options.max_seeds, hint)
        told = suite.decide is not None and options.status
        return options.seeds or (suite.decide.max_seeds if suite.decide and told else len(suite.seeds))
    hint = f"{suite.path} does not say when: give it the key decide, such as decide: {{margin: 1.6, max_seeds: 20}}"
    require(suite.decide is not None, "--until-decided", True, hint)
    assert suite.decide is not None
    hint = "--until-decided chooses their number: leave it out, or give --max-seeds"
    require(options.seeds is None, "--seeds", options.seeds, hint)
    most = suite.decide.max_seeds
    hint = f"the suite says {most} in decide.max_seeds, before the first run: give {len(suite.seeds)} to {most}"
    given = most if options.max_seeds is None else options.max_seeds
    require(len(suite.seeds) <= given <= most, "--max-seeds", options.max_seeds, hint)
    return given


def warn_of_settings(suite: Suite, cells: Sequence[Cell]) -> None:
    """Say on stderr which methods are run with other settings than the one that they are compared with."""
    texts = {
        (labels[list(suite.axes).index("method")], text) for labels, text in unequal_settings(suite, cells).items()
    }
    for method, text in sorted(texts):
        print(f"warning: {method}: {text}", file=sys.stderr)


def tune(
    options: argparse.Namespace, suite: Suite, extra: Sequence[Fragment], output: Path, args: Sequence[str]
) -> int:
    """Tune the methods of a suite and write the best values of each as a config; returns the exit status."""
    tuning = tuning_of(suite)
    tuning = replace(tuning, seeds=tuple(first_seeds(tuning.seeds, options.seeds)))
    known = {f"{AXIS}={file_part(label)}": label for label in tuning.search}
    for pattern in options.only:
        require(pattern in known, "--only", pattern, f"is no method that is tuned; those are {', '.join(known)}")
    wanted = [label for name, label in known.items() if not options.only or name in options.only]
    searches = [Search(suite, tuning, label, options.scale, extra, options.trials) for label in wanted]
    url = options.storage or default_url(output)
    check_searches(suite, searches)
    make_folder(output, "--output")
    database = open_database(url)
    check_study(suite, database, None if options.storage else output)
    studies = [SearchStudy(search, database) for search in searches]
    if options.retry:
        for study in studies:
            failed = [trial for trial in study.last_trials() if trial.state == TrialState.FAIL]
            study.forget({"digest": trial.user_attrs["digest"]} for trial in failed)
    driver = Driver(
        lambda: [SearchStudy(search, database) for search in searches],
        tuning.metric,
        output.resolve() / "tune",
        options.jobs,
        say,
    )
    driver.run()
    if status := why_ended(driver, args):
        return status
    for study in studies:
        with writing_into("--output", output, LATER):
            path = study.write_best(output, url)
        if path is not None:
            say(f"{study.search.label}: {path}")
            continue
        reasons = filter(None, (trial.user_attrs.get("reason") for trial in study.last_trials()))
        why = clipped(f"{study.search.label}: no trial has succeeded: {next(reasons, 'none has ended')}")
        print(f"error: {why}; --retry runs them again", file=sys.stderr)
        status = 1
    return status


def check_searches(suite: Suite, searches: Sequence[Search]) -> None:
    """Build the objects of a trial of each search, so that a key or a metric is refused before any trial runs.

    Raises:
        UsageError: they cannot be built, or do not have the metric.
    """
    tuning = searches[0].tuning
    trials = {search.label: search.cells(search.first_values())[0].fragments for search in searches}
    for label, reason in Runner().check(tuning.metric, trials).items():
        if reason.startswith("metric="):
            hint = reason.partition(": ")[2]
            raise UsageError(f"{suite.path}: tune.metric={tuning.metric!r}: {hint}")
        if "no 'val_fraction'" in reason:
            hint = f"{reason}; give null, and the data module a val_dataloader"
            raise UsageError(f"{suite.path}: tune.val_fraction={tuning.val_fraction}: {hint}")
        raise UsageError(f"{suite.path}: tune.search.{label}: {reason}")


def make_folder(folder: Path, key: str) -> Path:
    """Make the folder that an argument names, and return it.

    Raises:
        UsageError: it cannot be made or written to.
    """
    with writing_into(key, folder):
        folder.mkdir(parents=True, exist_ok=True)
    require(os.access(folder, os.W_OK), key, str(folder), "cannot be written to; give another folder")
    return folder


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
