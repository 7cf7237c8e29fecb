"""``bench SUITE``: run the cells of a suite, or say how far they are. Nothing here imports torch."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from optuna.study import Study

from fl_lightning.bench import Cell, Suite, load_suite
from fl_lightning.bench.cells_csv import read_cells
from fl_lightning.bench.driver import Driver
from fl_lightning.bench.estimate import as_time, estimates
from fl_lightning.bench.fragments import Fragment, fragments_of
from fl_lightning.bench.process import Runner
from fl_lightning.bench.results import Result
from fl_lightning.bench.stale import changed_code
from fl_lightning.bench.study import (
    DATABASE_ERRORS,
    cause_of,
    check_alone,
    connect,
    default_url,
    enqueue_anew,
    enqueue_failed,
    exists,
    find_study,
    load_results,
    open_study,
    results_of,
)
from fl_lightning.bench.suite import plain, select
from fl_lightning.bench.table import render, write_tables
from fl_lightning.bench.tune import Tuner, any_begun, check_metric, open_search, retry_failed, why_none, write_best
from fl_lightning.bench.tuning import AXIS, Search, tuning_of
from fl_lightning.cli.arguments import Parser, end_with_status, program
from fl_lightning.errors import UsageError, clipped, require
from fl_lightning.yaml_files import read_yaml

ABOUT = {
    "bench": "Run the cells of a suite, each a fit with several --config, and print its tables.",
    "tune": "Tune what a suite says under its key `tune`, on a validation split.",
}


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    parser = Parser(prog=f"{program()} {command}", description=ABOUT[command], allow_abbrev=False)
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
        parser.add_argument("--save", metavar="FOLDER", type=Path, help="write the tables and the cells there, too")
    else:
        parser.add_argument("--trials", type=int, metavar="N", help="number of trials")
    return parser


def main(args: Sequence[str]) -> None:
    """Run ``bench`` or ``tune``. Bad input ends it with one line and exit status 2, cells that failed with status 1.

    A signal ends it with the command that goes on, and status 128 + its number. It ends without a word where nobody
    reads its output any more.
    """
    # a user's own classes lie in the working folder, where the installed program does not look
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    run = bench if args[0] == "bench" else tune

    def command() -> int:
        try:
            return run(parser_of(args[0]).parse_args(args[1:]), args)
        except DATABASE_ERRORS as error:
            hint = "what is done is in it; see that it can be written to and that no process has locked it"
            raise UsageError(f"--storage: the database fails: {cause_of(error)}; {hint}, then go on") from error

    end_with_status(command)


def bench(given: argparse.Namespace, args: Sequence[str]) -> int:
    """Run the cells of a suite, or only say how far they are; returns the exit status."""
    suite = load_suite(given.suite)
    require(given.jobs >= 1, "--jobs", given.jobs, "give 1 or more")
    cells = cells_of(suite, given)
    output = Path(given.output or Path("runs") / suite.name)
    url = given.storage or default_url(output)
    known = {path: read_cells(path, suite.axes) for path in given.load}
    for path, results in known.items():
        check_load(path, results, all_cells(suite, given))
    if given.stale == "run":
        known = {path: without_changed(results) for path, results in known.items()}
    only_told = given.status or given.dry_run
    backend = connect(url) if exists(url) else None
    before = None if backend is None else find_study(suite, backend)
    if only_told and not known:
        return tell(suite, cells, given, before)
    if not only_told and given.stale is None:
        # those of the study count before those of files
        check_code(cells, [*known.values(), results_of(before, cells)])
    make_folder(output, "--output")
    if given.save is not None:
        make_folder(given.save, "--save")
    backend = backend or connect(url)
    if not given.storage:
        check_alone(suite, backend, output)
    study = open_study(suite, backend, cells)
    for path, results in known.items():
        say(load_file(path, results, study, all_cells(suite, given)))
    if only_told:
        return tell(suite, cells, given, study)
    if given.retry:
        enqueue_failed(study, cells)
    if given.stale == "run":
        changed = changed_code(results_of(study, cells))
        enqueue_anew(study, [cell for cell in cells if cell.digest in changed])
    driver = Driver(suite, cells, backend, output.resolve(), given.jobs, say)
    driver.run()
    if status := ended(driver, args):
        return status
    # before they are printed: who reads them may close the pipe, as `head` does
    write_all(suite, study, given, [output, *([given.save] if given.save else [])])
    return finish(suite, cells, results_of(study, cells))


def tell(suite: Suite, cells: Sequence[Cell], given: argparse.Namespace, study: Study | None) -> int:
    """Say how far the cells are, or what is left to run; returns the exit status."""
    results = results_of(study, cells)
    if given.save is not None:
        write_all(suite, study, given, [make_folder(given.save, "--save")])
    if given.dry_run and given.stale == "run":
        results |= {digest: replace(results[digest], state="waiting") for digest in changed_code(results)}
    print(render(suite, cells, results) if given.status else plan_of(suite, cells, results, given.jobs))
    return 0


def check_code(cells: Sequence[Cell], results: Sequence[Mapping[str, Result]]) -> None:
    """Refuse to go on where finished cells were run with another version of the user's own code, and say which.

    Args:
        cells: the cells that are asked for.
        results: results by digest, from several places; the last that are done count.

    Raises:
        UsageError: there are such cells.
    """
    done = {digest: one for place in results for digest, one in place.items() if one.state == "done"}
    changed = changed_code({cell.digest: done[cell.digest] for cell in cells if cell.digest in done})
    for cell in cells:
        if cell.digest in changed:
            say(f"{cell.name}: run with another version of {', '.join(changed[cell.digest])}")
    modules = ", ".join(sorted({name for names in changed.values() for name in names}))
    hint = f"{modules} changed since {len(changed)} finished cells were run; give run to run these anew, or keep to "
    require(not changed, "--stale", None, f"{hint}keep them, which the tables say")


def without_changed(results: Mapping[str, Result]) -> dict[str, Result]:
    """Results without those that were run with another version of the user's own code."""
    changed = changed_code(results)
    return {digest: result for digest, result in results.items() if digest not in changed}


def check_load(path: Path, results: Mapping[str, Result], cells: Sequence[Cell]) -> None:
    """Refuse a file of which nothing would be taken.

    Raises:
        UsageError: no finished cell of it is one of ours.
    """
    done = {digest for digest, result in results.items() if result.state == "done"}
    hint = f"none of its {len(done)} finished cells is one of this suite with this --scale, --seeds and --config; "
    hint += "leave the file out, or give those that it was made with"
    require(not done.isdisjoint({cell.digest for cell in cells}), "--load", str(path), hint)


def load_file(path: Path, results: Mapping[str, Result], study: Study, cells: Sequence[Cell]) -> str:
    """Count the cells as done that are so in a file; returns the line that says how many."""
    done = {digest for digest, result in results.items() if result.state == "done"}
    loaded = load_results(study, cells, results)
    strange = len(done - {cell.digest for cell in cells})
    others = f"; {strange} others are no cells of this suite, or had another config or scale" if strange else ""
    return f"{path}: {loaded} of {len(done)} finished cells are new here{others}"


def ended(driver: Driver, args: Sequence[str]) -> int:
    """Say what has ended the jobs before all was done; returns the exit status, 0 where nothing has."""
    if driver.error is not None:
        database = isinstance(driver.error, DATABASE_ERRORS)
        named = "the database fails" if database else type(driver.error).__name__
        why = clipped(f"{named}: {cause_of(driver.error) if database else driver.error}")
        print(f"error: {why}; go on: {again(args)}", file=sys.stderr)
        return 1
    if driver.caught is not None:
        print(f"{driver.caught.name} stopped it; go on: {again(args)}", file=sys.stderr)
        return 128 + driver.caught
    return 0


def tune(given: argparse.Namespace, args: Sequence[str]) -> int:
    """Tune the methods of a suite and write the best values of each as a config; returns the exit status."""
    suite = load_suite(given.suite)
    require(given.jobs >= 1, "--jobs", given.jobs, "give 1 or more")
    require(given.trials is None or given.trials >= 1, "--trials", given.trials, "give 1 or more")
    searches = searches_of(suite, given)
    output = Path(given.output or Path("runs") / suite.name)
    url = given.storage or default_url(output)
    first = Runner()
    if not (exists(url) and any_begun(searches, connect(url))):
        check_metric(searches[0], first)
    make_folder(output, "--output")
    backend = connect(url)
    if not given.storage:
        check_alone(suite, backend, output)
    studies = [open_search(search, backend) for search in searches]
    for search, study in zip(searches, studies, strict=True):
        if given.retry:
            retry_failed(search, study)
    runs = output.resolve() / "tune"
    tuner = Tuner(suite, searches, backend, runs, given.jobs, say, lambda job: Runner(job) if job else first)
    tuner.run()
    if status := ended(tuner, args):
        return status
    for search, study in zip(searches, studies, strict=True):
        with writing(output):
            path = write_best(search, study, output, url)
        if path is not None:
            say(f"{search.label}: {path}")
            continue
        why = clipped(f"{search.label}: no trial has succeeded: {why_none(search, study)}")
        print(f"error: {why}; --retry runs them again", file=sys.stderr)
        status = 1
    return status


def cells_of(suite: Suite, given: argparse.Namespace) -> list[Cell]:
    """The cells that are asked for.

    Raises:
        UsageError: an argument is out of its range, or a file cannot be read.
    """
    require(given.seeds is None or given.seeds >= 1, "--seeds", given.seeds, "give 1 or more")
    require(0 < given.scale <= 1, "--scale", given.scale, "give a share of the work above 0, up to 1")
    return select(suite.cells(given.scale, extra_of(given), seeds_of(suite.seeds, given.seeds)), given.only)


def extra_of(given: argparse.Namespace) -> list[Fragment]:
    """What the files of ``--config`` hold."""
    return [part for path in given.config for part in fragments_of(read_yaml(path), path)]


def seeds_of(seeds: Sequence[int], number: int | None) -> list[int]:
    """The first few of some seeds, and the smallest others where there are not enough."""
    more = (seed for seed in itertools.count() if seed not in seeds)
    return list(itertools.islice(itertools.chain(seeds, more), number or len(seeds)))


def searches_of(suite: Suite, given: argparse.Namespace) -> list[Search]:
    """The searches that are asked for.

    Raises:
        UsageError: the suite says nothing of tuning, an argument is out of its range, or a pattern matches no method.
    """
    require(given.seeds is None or given.seeds >= 1, "--seeds", given.seeds, "give 1 or more")
    tuning = tuning_of(suite)
    tuning = replace(tuning, seeds=tuple(seeds_of(tuning.seeds, given.seeds)))
    known = {f"{AXIS}={plain(label)}": label for label in tuning.search}
    for pattern in given.only:
        require(pattern in known, "--only", pattern, f"is no method that is tuned; those are {', '.join(known)}")
    wanted = [label for name, label in known.items() if not given.only or name in given.only]
    return [Search(suite, tuning, label, given.scale, extra_of(given), given.trials) for label in wanted]


def write_all(suite: Suite, study: Study | None, given: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Write the tables of the whole suite into the folders, whatever part of it was asked for."""
    cells = all_cells(suite, given)
    for folder in folders:
        with writing(folder):
            write_tables(suite, cells, results_of(study, cells), folder)


def all_cells(suite: Suite, given: argparse.Namespace) -> list[Cell]:
    """The cells of the whole suite, whatever part of it was asked for."""
    seeds = seeds_of(suite.seeds, max(len(suite.seeds), given.seeds or 0))
    return suite.cells(given.scale, extra_of(given), seeds)


def finish(suite: Suite, cells: Sequence[Cell], results: Mapping[str, Result]) -> int:
    """Print the tables of the cells, and say which of them failed; returns the exit status."""
    print(render(suite, cells, results))
    failed = sum(result.state == "failed" for result in results.values())
    if failed:
        some = f"{failed} of {len(results)} cells failed"
        print(f"error: {some}; the table says why, and --retry runs them again", file=sys.stderr)
    return 1 if failed else 0


def plan_of(suite: Suite, cells: Sequence[Cell], results: Mapping[str, Result], jobs: int) -> str:
    """How many cells there are, and how long they will take; measures a round of each kind."""
    total, failed = 0.0, 0
    for one in estimates(cells, results, suite.metric):
        total += one.total
        failed += bool(one.reason)
        how = f"{one.rounds} rounds of {as_time(one.seconds)}" if one.seconds is not None else one.reason
        print(f"{one.kind}: {one.left} to run, {how or 'done'}", flush=True)
    states = [result.state for result in results.values()]
    done = f"{len(states)} cells, {states.count('done')} done, {states.count('failed')} failed"
    left = f"the others take about {as_time(total / jobs)} with --jobs {jobs}"
    return f"{done}; {left}" + (f", without {failed} of these lines, which cannot be run" if failed else "")


def make_folder(folder: Path, key: str) -> Path:
    """Make the folder that an argument names, and return it.

    Raises:
        UsageError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{key}={str(folder)!r}: {error.strerror}; give a folder that can be written to") from error
    require(os.access(folder, os.W_OK), key, str(folder), "cannot be written to; give another folder")
    return folder


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Refuse a folder in which the block cannot write its files, as on a full disk."""
    try:
        yield
    except OSError as error:
        hint = "what is done is in the study; give the command again when the folder can be written to"
        raise UsageError(f"--output={str(folder)!r}: {error.strerror or error}; {hint}") from error


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def again(args: Sequence[str]) -> str:
    """The command that goes on."""
    return f"{program()} {shlex.join(arg for arg in args if arg != '--retry')}"
