"""``bench SUITE``: run the cells of a suite, or say how far they are. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from joblib import cpu_count
from optuna.study import Study

from fl_lightning.bench import Cell, Suite, load_suite
from fl_lightning.bench.cell import file_part
from fl_lightning.bench.cells_csv import read_cells
from fl_lightning.bench.comparison import Part, compared_runs, unequal_settings, without_method
from fl_lightning.bench.config_fragments import Fragment, config_digest, look_up
from fl_lightning.bench.leaderboard import standings, with_rows, write_leaderboard
from fl_lightning.bench.results import CellResult, changed_code
from fl_lightning.bench.scheduler import Scheduler, SuiteStudy
from fl_lightning.bench.sequential_stopping import paired_cells, pending_cells, shown_cells
from fl_lightning.bench.study import (
    DATABASE_ERRORS,
    SQLITE,
    cause_of,
    exists,
    find_study,
    load_results,
    open_database,
    results_of,
)
from fl_lightning.bench.suite import first_seeds, selected_cells, without_data
from fl_lightning.bench.suite_file import seedless, with_tuned
from fl_lightning.bench.table import conclusion, render, write_tables
from fl_lightning.bench.table_rendering import markdown
from fl_lightning.bench.tuner import AXIS, Search, SearchStudy, read_tuning_specs
from fl_lightning.bench.worker_client import WorkerClient
from fl_lightning.cli.entry_point import (
    COMMANDS,
    OneLineParser,
    end_with_status,
    find_own_classes,
    program,
)
from fl_lightning.utilities.errors import UsageError, UsageErrors, count, require, truncate, writing_into
from fl_lightning.utilities.yaml_files import parse_yaml, read_yaml

# names that a line lists
MOST_NAMES = 5
say = partial(print, flush=True)
LATER = "finished cells are in the study; repeat the command once the folder is writable"


def bench_parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    parser = OneLineParser(prog=f"{program()} {command}", description=COMMANDS[command], allow_abbrev=False)
    parser.add_argument("suite", metavar="SUITE", help="YAML file of the suite")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the work to do, in (0, 1]")
    parser.add_argument("--storage", metavar="URL", help="database of the study; default: study.db in the output")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of all runs; default: runs/<suite>")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells side by side")
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    about = "cells that match one of these, such as method=FedCKA,alpha=0.1"
    parser.add_argument("--only", metavar="PATTERN", help=about, **many)
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds of each cell")
    about = "config that comes last, in all cells"
    parser.add_argument("--config", metavar="FILE", type=Path, action="append", default=[], help=about)
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    if command == "bench":
        parser.add_argument("--dry-run", action="store_true", help="print the number of cells and their estimated time")
        parser.add_argument("--status", action="store_true", help="print the tables so far, run nothing")
        about = "rows to add to the axis method, and to run: a config's file, or the class of a method"
        parser.add_argument("--add", metavar="ROW", help=about, **many)
        about = "values of a coefficient, tuned first for each row of --add, such as mu=0.1,1,10"
        parser.add_argument("--tune", metavar="KEY=VALUES", help=about, **many)
        about = "rows to run here although the suite comes with their cells, such as FedAvg"
        parser.add_argument("--rerun", metavar="ROW", help=about, **many)
        about = "files of cells, for example from another machine, whose finished cells are not run again"
        parser.add_argument("--load", metavar="FILE", type=Path, help=about, **many)
        about = "finished cells whose own code has changed since: run them again, or keep them"
        parser.add_argument("--stale", choices=("run", "keep"), help=about)
        about = "add seeds to the pairs that are undecided, as the suite's key decide says"
        parser.add_argument("--until-decided", action="store_true", help=about)
        about = "try the suite without its data set, by tiny runs whose numbers mean nothing"
        parser.add_argument("--offline", action="store_true", help=about)
        parser.add_argument("--save", metavar="FOLDER", type=Path, help="write the tables and the cells there, too")
    else:
        parser.add_argument("--trials", type=int, metavar="N", help="number of trials")
    return parser


def main(args: Sequence[str]) -> None:
    """Run ``bench`` or ``tune``. Bad input ends it with one line and exit status 2, cells that failed with status 1.

    A signal ends it with the command that resumes it, and status 128 + its number.
    """
    find_own_classes()
    end_with_status(partial(run, args))


def run(args: Sequence[str]) -> int:
    """Read the suite and run the command; returns the exit status."""
    options = bench_parser(args[0]).parse_args(args[1:])
    suite = load_suite(options.suite)
    if getattr(options, "offline", False):
        hint = "leave it out with --offline"
        require(options.scale == 1, "--scale", options.scale, hint)
        require(not options.until_decided, "--until-decided", True, hint)
        suite = without_data(suite)
    if getattr(options, "add", ()):
        suite, options.add = with_rows(suite, options.add)
    for label in getattr(options, "rerun", ()):
        require(label in suite.axes.get(AXIS, ()), "--rerun", label, "is not a row of the suite; name one")
    for name in ("jobs", "trials", "seeds"):
        number = getattr(options, name, None)
        require(number is None or number >= 1, f"--{name}", number, "give 1 or more")
    extra = list[Fragment]()
    for path in options.config:
        extra += seedless(read_yaml(path), path, f"--config {path}")
    options.own_output, options.output = options.storage is None, options.output or Path("runs") / suite.name
    options.storage = options.storage or f"{SQLITE}{options.output / 'study.db'}"
    options.again = f"{program()} {shlex.join(arg for arg in args if arg != '--retry')}"
    try:
        if getattr(options, "tune", ()):
            suite = with_search(options, suite)
            seeds_of_suite = argparse.Namespace(**{**vars(options), "seeds": None, "trials": None})
            if not options.status and (status := tune(seeds_of_suite, suite, extra)):
                return status
            # an earlier command may have tuned other rows there
            suite = with_tuned(suite, options.output / "tuned", {*map(file_part, options.add)})
        return (bench if args[0] == "bench" else tune)(options, suite, extra)
    except DATABASE_ERRORS as error:
        hint = "finished cells are in it; check that it is writable and not locked"
        raise UsageError(f"--storage: the database fails: {cause_of(error)}; {hint}, then continue") from error


def with_search(options: argparse.Namespace, suite: Suite) -> Suite:
    """Return a suite that searches the values of ``--tune`` for the added rows."""
    require(bool(options.add), "--tune", options.tune, "tunes the rows of --add; add one")
    require(not options.dry_run, "--dry-run", True, "does not count the trials of --tune; leave one of them out")
    values: dict[str, list[Any]] = {}
    for text in options.tune:
        key, equals, numbers = text.partition("=")
        space = parse_yaml(f"[{numbers}]", f"--tune {text}") if equals else []
        require(bool(space), "--tune", text, "give a key and its values, such as mu=0.1,1,10")
        values[key] = [*values.get(key, ()), *space]
    return replace(suite, tune={**suite.tune, "search": dict.fromkeys(options.add, values)})


def bench(options: argparse.Namespace, suite: Suite, extra: Sequence[Fragment]) -> int:
    """Run the cells of a suite, or only say how far they are; returns the exit status."""
    seeds = first_seeds(suite.seeds, most_seeds(options, suite))
    # written tables always contain the whole suite
    number = max(len(suite.seeds), options.seeds or 0, suite.decide.max_seeds if suite.decide else 0)
    all_cells = suite.cells(options.scale, extra, first_seeds(suite.seeds, number))
    select = partial(paired_cells, suite) if options.until_decided else selected_cells
    selected = select([cell for cell in all_cells if cell.seed in seeds], options.only)
    # other rows have neither this scale nor these data
    options.ranked = bool(options.add) and options.scale == 1 and not options.offline
    if options.add:
        selected = [cell for cell in selected if cell.labels[AXIS] in (*options.add, *options.rerun)]
        require(bool(selected), "--only", options.only, "has no cell of the rows of --add; leave it out")
    finished_before = read_finished(suite.finished)
    cells = [cell for cell in selected if cell.digest not in finished_before or cell.labels.get(AXIS) in options.rerun]
    check_jobs(options.jobs, cells)
    loaded: dict[Path, dict[str, CellResult]] = {}
    for path in options.load:
        results = {result.digest: result for _, result in read_cells(path, suite.axes)}
        loaded[path] = finished(results)
        hint = f"none of its {len(loaded[path])} finished cells is one of this suite with this --scale, --seeds and "
        hint += "--config; leave the file out, or give those that it was made with"
        require(any(cell.digest in loaded[path] for cell in all_cells), "--load", str(path), hint)
    only_look = options.status or options.dry_run or not cells
    if not cells:
        options.status = True
    database = open_database(options.storage) if exists(options.storage) else None
    before = find_study(suite, database, options.output if options.own_output else None) if database else None
    # results of the study take precedence over files
    results_done: dict[str, CellResult] = {}
    for results in (*loaded.values(), results_of(before, cells)):
        results_done |= finished(results)
    changed = changed_code(results_done)
    dropped = set(changed) if options.stale == "run" else set()
    if not only_look and options.stale is None:
        refuse_changed([cell for cell in cells if cell.digest in changed], changed)
    to_run = [cell for cell in cells if cell.digest not in results_done.keys() - dropped]
    if not options.status:
        check_settings(suite, cells, all_cells)
        # of each kind of cell, so that a config that is not valid is refused before any cell runs
        first_cells = [cells_of_kind[0] for cells_of_kind in kinds_of(to_run)]
        check_cells(suite.metric, {cell.name.rpartition(",")[0]: cell for cell in first_cells})
    if loaded or not only_look:
        make_folder(options.output, "--output")
    if options.save is not None:
        make_folder(options.save, "--save")
    if only_look and not loaded:
        return look(suite, selected, all_cells, options, before, to_run)
    database = database or open_database(options.storage)
    study = SuiteStudy(suite, database, cells, partial(pending_cells, suite, cells) if options.until_decided else None)
    for path, results in loaded.items():
        valid = {digest: result for digest, result in results.items() if digest not in dropped}
        text = f"{load_results(study, all_cells, valid)} of {len(valid)} finished cells are new here"
        foreign = len(valid.keys() - {cell.digest for cell in all_cells})
        if foreign:
            text += f"; {foreign} others are not cells of this suite, or have another config or scale"
        say(f"{path}: {text}")
    if only_look:
        return look(suite, selected, all_cells, options, study, to_run)
    if options.retry:
        study.retry()
    study.free(dropped & finished(study.results()).keys(), anew=True)
    if options.add:
        say(work_left(selected, to_run, all_cells, results_of(study, all_cells, finished_before), options)[-1])
    scheduler = Scheduler([study], suite.metric, options.output.resolve(), options.jobs, say)
    scheduler.run()
    if status := why_ended(scheduler, options.again):
        return status
    # before they are printed: who reads them may close the pipe, as `head` does
    files = [write_shown(suite, all_cells, study, "--output", options.output)]
    if options.save is not None:
        files.append(write_shown(suite, all_cells, study, "--save", options.save))
    if options.ranked:
        files.append(print_standings(suite, all_cells, options, study))
    else:
        print(in_words(suite, selected, results_of(study, selected, finished_before)))
    results = study.results()
    for table, *beside in filter(None, files):
        say(f"Tables: {table}, {', '.join(path.name for path in beside)}")
    num_failed = sum(result.state == "failed" for result in results.values())
    if num_failed:
        text = f"{num_failed} of {len(results)} cells failed"
        print(f"error: {text}; the table says why, and --retry runs them again", file=sys.stderr)
    return 1 if num_failed else 0


@cache
def read_finished(path: Path | None) -> dict[str, CellResult]:
    """The results of the finished cells of a file, by digest; none without a file."""
    pairs = () if path is None else read_cells(path)
    return finished({result.digest: result for _, result in pairs})


def print_standings(
    suite: Suite, cells: Sequence[Cell], options: argparse.Namespace, study: Study | None
) -> list[Path]:
    """Print where the added rows stand in each setting, and write all standings; return the files."""
    results = results_of(study, cells, read_finished(suite.finished))
    board = standings(suite, cells, results, options.add)
    rows = {row for standing in board.values() for row in standing.frame.index}
    if rows.isdisjoint(options.add):
        say("no added row has a number")
        return []
    for part, standing in board.items():
        title = ", ".join(filter(None, part))
        labels = [label for label in options.add if label in standing.frame.index]
        if labels:
            compared = {*labels}.union(*map(standing.rivals, labels))
            methods = [method for method in standing.frame.index if method in compared]
            print("\n".join(["", *markdown(standing.table(title, methods))]))
        for label in labels:
            say(f"{title}: {standing.sentence(label)}")
    machines = {results[cell.digest].machine for cell in cells if cell.digest in results} - {""}
    if len(machines) > 1:
        names = "; ".join(sorted(machines))
        say(f"The rows ran on {names}: rounding differs between machines; --rerun ROW runs one here.")
    stale = {module for modules in changed_code(results).values() for module in modules}
    if stale:
        say(f"Some cells were run with another version of {', '.join(sorted(stale))}; --stale run runs them again.")
    make_folder(options.output, "--output")
    with writing_into("--output", options.output, LATER):
        return write_leaderboard(suite, board, options.add, options.output)


def finished(results: Mapping[str, CellResult]) -> dict[str, CellResult]:
    """The results of the cells that are done."""
    return {digest: result for digest, result in results.items() if result.state == "done"}


def refuse_changed(cells: Sequence[Cell], changed: Mapping[str, Sequence[str]]) -> None:
    """Refuse finished cells of which modules have changed, by digest."""
    names = set[str]()
    for cell in cells:
        names |= {*changed[cell.digest]}
        say(f"{cell.name}: run with another version of {', '.join(changed[cell.digest])}")
    number = len({cell.digest for cell in cells})
    hint = f"{', '.join(sorted(names))} changed since {number} finished cells were run; give run to run "
    require(not cells, "--stale", None, f"{hint}these again, or keep to keep them, as the tables then state")


def check_settings(suite: Suite, cells: Sequence[Cell], all_cells: Sequence[Cell]) -> None:
    """Warn of methods with other settings than the baseline; refuse tables of what no cell logs."""
    settings = unequal_settings(suite, suite.axes, compared_runs(suite, all_cells, {}))
    texts = set[tuple[str, str]]()
    for cell in cells:
        if text := settings.get(tuple(cell.labels.values())):
            texts.add((cell.labels[AXIS], text))
    for label, text in sorted(texts):
        print(f"warning: {label}: {text}", file=sys.stderr)
    shows = {table.show.name: table.show.callback for table in suite.tables}
    for show, callback in shows.items():
        logged = any(callback in str(look_up(cell.config, "trainer.callbacks")) for cell in cells)
        hint = "no cell has the callback that logs this: add to the base trainer: "
        hint += f"{{callbacks+: [{{class_path: {callback}}}]}}"
        require(logged or not callback, f"{suite.path}: tables.show", show, hint)


def check_cells(metric: str, cells: Mapping[str, Cell]) -> None:
    """Build the objects of cells by name."""
    configs = {name: cell.fragments for name, cell in cells.items()}
    wrong = WorkerClient().check(metric, configs) if configs else {}
    lines = []
    for line in grouped(wrong.items()):
        if "no 'val_fraction'" in line:
            line += "; give null as val_fraction, and the data module a val_dataloader"
        lines.append(line)
    valid = [cell.name.rpartition(",")[0] for name, cell in cells.items() if name not in wrong]
    if lines and 0 < len(valid) <= MOST_NAMES:
        lines.append(f"{len(valid)} of {len(cells)} can run: --only {shlex.join(valid)}")
    if lines:
        raise UsageErrors(lines)


def check_jobs(jobs: int, cells: Iterable[Cell]) -> None:
    """Refuse more jobs than the cores can run at once."""
    cores, max_threads = cpu_count(), 1
    for cell in cells:
        devices = look_up(cell.config, "trainer.devices", 1)
        # a worker for each of several GPUs in a list
        workers = cores if devices == "auto" else len(devices) if isinstance(devices, list) else int(devices)
        max_threads = max(max_threads, workers * (look_up(cell.config, "trainer.threads_per_worker", 1) or 1))
    hint = f"a job of this suite has {count(max_threads, 'thread')}, and there are {count(cores, 'core')}; use at most "
    require(jobs == 1 or jobs * max_threads <= cores, "--jobs", jobs, f"{hint}{max(1, cores // max_threads)}")


def kinds_of(cells: Iterable[Cell]) -> Collection[list[Cell]]:
    """The cells of each config, which differ in their seed alone."""
    kinds = defaultdict[str, list[Cell]](list)
    for cell in cells:
        kinds[config_digest({**cell.config, "seed_everything": None})].append(cell)
    return kinds.values()


def grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Names and texts as a line for each text, with the first few of its names."""
    groups, lines = defaultdict[str, dict[str, None]](dict), []
    for name, text in pairs:
        groups[text][name] = None
    for text, names in groups.items():
        listed = "; ".join([*names][:MOST_NAMES])
        if len(names) > MOST_NAMES:
            listed += f" and {len(names) - MOST_NAMES} more"
        lines.append(f"{listed}: {text}")
    return lines


def look(
    suite: Suite,
    cells: Sequence[Cell],
    all_cells: Sequence[Cell],
    options: argparse.Namespace,
    study: Study | None,
    to_run: Sequence[Cell],
) -> int:
    """Print the tables so far, or the remaining work with its estimated time; return 0."""
    results = results_of(study, all_cells, read_finished(suite.finished))
    if options.save is not None:
        write_shown(suite, all_cells, study, "--save", options.save)
    if options.status and options.ranked:
        print_standings(suite, all_cells, options, study)
        return 0
    if options.status:
        print(in_words(suite, cells, results))
        return 0
    print("\n".join(work_left(cells, to_run, all_cells, results, options)))
    return 0


def work_left(
    cells: Sequence[Cell],
    to_run: Sequence[Cell],
    all_cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    options: argparse.Namespace,
) -> list[str]:
    """The number of cells to run of each config, and how long all of them take.

    A round takes as long as in the finished cells of its config or, without one, of the other methods in its setting.
    """
    states: dict[str, str] = {cell.digest: results[cell.digest].state for cell in cells}
    states |= {cell.digest: "waiting" for cell in to_run if states[cell.digest] == "done"}
    of_settings = defaultdict[Part, list[float]](list)
    for cell in all_cells:
        of_settings[without_method(cell.labels)] += filter(None, [results[cell.digest].seconds])
    lines, total, num_unknown = list[tuple[str, str]](), 0.0, 0
    for cells_of_kind in kinds_of(cells):
        num_waiting = sum(states[cell.digest] in ("waiting", "running") for cell in cells_of_kind)
        of_kind = [*filter(None, (results[cell.digest].seconds for cell in cells_of_kind))]
        seconds = of_kind or of_settings[without_method(cells_of_kind[0].labels)]
        rounds = int(look_up(cells_of_kind[0].config, "trainer.max_rounds", 10))
        text = f"{num_waiting} to run, {rounds} rounds"
        if seconds:
            typical = statistics.median(seconds)
            total += num_waiting * rounds * typical
            text += f" of {as_time(typical)}"
        else:
            num_unknown += num_waiting
        lines.append((cells_of_kind[0].name.rpartition(",")[0], text if num_waiting else "done"))
    counts = Counter(states.values())
    parts = [f"{count(len(states), 'cell')}, {counts['done']} done, {counts['failed']} failed"]
    if total:
        time = f"{'at most ' * options.until_decided}about {as_time(total / options.jobs)}"
        parts.append(f"the rounds of the others take {time} with --jobs {options.jobs}")
    if num_unknown:
        parts.append(f"no time estimate for {num_unknown}, as no similar cell has finished")
    return [*grouped(lines), "; ".join(parts)]


def as_time(seconds: float) -> str:
    """A duration as text, such as ``1 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def in_words(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> str:
    """The tables of a suite, followed by their conclusion."""
    cells = shown_cells(suite, cells, results)
    return f"{render(suite, cells, results)}\n{conclusion(suite, cells, results)}"


def write_shown(suite: Suite, cells: Sequence[Cell], study: Study | None, key: str, folder: Path) -> list[Path]:
    """Write the tables of the whole suite into the folder that ``key`` names; return the files."""
    results = results_of(study, cells, read_finished(suite.finished))
    with writing_into(key, folder, LATER):
        return write_tables(suite, shown_cells(suite, cells, results), results, folder)


def why_ended(scheduler: Scheduler, again: str) -> int:
    """Say why the jobs ended before all was done; returns the exit status, 0 where all is done."""
    if scheduler.error is not None:
        why = f"{type(scheduler.error).__name__}: {cause_of(scheduler.error)}"
        print(f"error: {truncate(why)}; continue: {again}", file=sys.stderr)
        return 1
    if scheduler.caught is not None:
        print(f"{scheduler.caught.name} stopped it; continue: {again}", file=sys.stderr)
        return 128 + scheduler.caught
    return 0


def most_seeds(options: argparse.Namespace, suite: Suite) -> int:
    """The number of seeds that cells may be asked for."""
    if not options.until_decided:
        looks = suite.decide is not None and options.status
        return options.seeds or (suite.decide.max_seeds if suite.decide and looks else len(suite.seeds))
    hint = "--until-decided chooses their number: leave it out"
    require(options.seeds is None, "--seeds", options.seeds, hint)
    if suite.decide is None:
        hint = "has no rule; add the key decide, such as decide: {margin: 1.6, max_seeds: 20}"
        raise UsageError(f"--until-decided: {suite.path} {hint}")
    return suite.decide.max_seeds


def tune(options: argparse.Namespace, suite: Suite, extra: Sequence[Fragment]) -> int:
    """Tune the methods of a suite and write the best values of each as a config; returns the exit status."""
    specs, output = read_tuning_specs(suite), options.output
    specs = [replace(spec, seeds=tuple(first_seeds(spec.seeds, options.seeds))) for spec in specs]
    first_cells, included = dict[str, tuple[Search, Cell]](), [*suite.combinations()]
    for label in specs[0].search:
        for spec in specs:
            search = Search(suite, spec, label, options.scale, extra, options.trials)
            cell = search.first_cell()
            if cell.labels in included:
                first_cells[cell.name] = search, cell
    searches, cells = list[Search](), dict[str, Cell]()
    for cell in selected_cells([cell for _, cell in first_cells.values()], options.only):
        search, _ = first_cells[cell.name]
        searches.append(search)
        name = ", ".join([f"tune.search.{search.label}", *search.setting])
        cells[f"{suite.path}: {name}"] = cell
    check_jobs(options.jobs, cells.values())
    # a key or a metric that is not valid is refused before any trial runs
    check_cells(specs[0].metric, cells)
    make_folder(output, "--output")
    database = open_database(options.storage)
    find_study(suite, database, output if options.own_output else None)
    studies = [SearchStudy(search, database) for search in searches]
    for study in studies if options.retry else ():
        study.retry()
    scheduler = Scheduler(studies, specs[0].metric, output.resolve() / "tune", options.jobs, say)
    scheduler.run()
    status = why_ended(scheduler, options.again)
    for study in studies if status == 0 else ():
        with writing_into("--output", output, LATER):
            path = study.write_best(output, options.storage)
        if path is not None:
            say(f"{study.search.label}: {path}")
            continue
        reasons = filter(None, (trial.user_attrs.get("reason") for trial in study.last_trials()))
        why = truncate(f"{study.search.label}: no trial has succeeded: {next(reasons, 'none has ended')}")
        print(f"error: {why}; --retry runs them again", file=sys.stderr)
        status = 1
    return status


def make_folder(folder: Path, key: str) -> None:
    """Make the folder that an argument names."""
    with writing_into(key, folder):
        folder.mkdir(parents=True, exist_ok=True)
    require(os.access(folder, os.W_OK), key, str(folder), "is not writable; use another folder")
