"""Console output of a run: a line for each evaluation, bars on a terminal, and a summary at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tqdm import tqdm

from fl_lightning.callbacks.base import Callback
from fl_lightning.client.run_context import RunContext
from fl_lightning.storage.metric_format import best, final, final_names, format_value, names_to_show
from fl_lightning.utilities.errors import count

# seconds after which a round has its own bar
LONG = 2.0
# metrics in the table at the end at most
MOST_SHOWN = 20


class ProgressBar(Callback):
    """Reports progress on stderr: a line for each evaluation, and tables at the end.

    The tables show the best and final metrics, and summaries of other callbacks, such as each site's accuracy.

    A terminal also shows a bar over the rounds and, in rounds of more than two seconds, a bar over the clients of the
    first worker, with the remaining time.
    """

    _rounds: Any = None
    _clients: Any = None

    def on_fit_start(self, trainer: RunContext) -> None:
        self._first, self._began, self._said = len(trainer.history), time.perf_counter(), -1
        self._speaks = trainer.global_rank == 0
        if self._speaks:
            self._say(first_line(trainer))
        if self._speaks and sys.stderr.isatty():
            self._rounds = tqdm(total=trainer.max_rounds, initial=self._first, desc="rounds", unit="round")

    def on_round_start(self, trainer: RunContext) -> None:
        if self._rounds is not None:
            how: dict[str, Any] = {"unit": "client", "leave": False, "position": 1, "delay": LONG}
            self._clients = tqdm(total=len(trainer.server.cohort), desc=f"round {trainer.server.round}", **how)

    def on_visits_end(self, trainer: RunContext, number: int) -> None:
        if self._clients is not None:
            # the number of this worker's clients is known by now
            total = trainer.metrics.get(f"placed/{trainer.global_rank}/clients", self._clients.total)
            self._clients.total = int(total)
            self._clients.update(number)

    def on_round_end(self, trainer: RunContext) -> None:
        if self._clients is not None:
            self._clients.close()
            self._rounds.update()
        if self._speaks and (trainer.evaluation_is_due or final_names(trainer.metrics)):
            self._say_round(trainer)

    def on_last_round_end(self, trainer: RunContext) -> None:
        if self._speaks and self._said != trainer.server.round:
            self._say_round(trainer)

    def on_fit_end(self, trainer: RunContext) -> None:
        if self._speaks and len(trainer.history) > self._first:
            self._close()
            seconds = time.perf_counter() - self._began
            table = final_table(trainer.history, seconds, self._first, trainer.run_dir)
            self._say("\n".join([*summaries(trainer), table]))

    def on_evaluation_command_end(self, trainer: RunContext, phase: str) -> None:
        texts = summaries(trainer)
        if trainer.global_rank == 0 and texts:
            self._say("\n".join(texts))

    def teardown(self, trainer: RunContext) -> None:
        self._close()

    def _say_round(self, trainer: RunContext) -> None:
        folder, names = trainer.run_dir, names_to_show(trainer.metrics)
        if self._said < 0 and folder and names and has_events(folder):
            cards = json.dumps([{"plugin": "scalars", "tag": names[0]}], separators=(",", ":"))
            address = f"http://localhost:6006/?pinnedCards={quote(cards, safe=':,/')}&smoothing=0"
            self._say(f"curves: tensorboard --logdir {folder.parents[1]}, then open {address}")
        self._said = trainer.server.round
        seconds = (time.perf_counter() - self._began) / (self._said + 1 - self._first)
        self._say(round_line(trainer.metrics, self._said, trainer.max_rounds, seconds))

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a log on a full disk does not end a run
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def _close(self) -> None:
        for bar in (self._clients, self._rounds):
            if bar is not None:
                bar.close()
        self._clients = self._rounds = None


def first_line(trainer: RunContext) -> str:
    """Return what runs, and the folder of its results."""
    methods = " + ".join(type(method).__name__ for method in trainer.methods.methods) or "FedAvg"
    model = type(trainer.client.module).__name__
    datamodule = type(getattr(trainer.data, "datamodule", trainer.data)).__name__
    length = count(trainer.max_rounds - len(trainer.history), "round")
    if trainer.max_seconds is not None:
        length += f" in {trainer.max_seconds - trainer.server.time:g} simulated seconds"
    where = f"results in {trainer.run_dir}" if trainer.run_dir else "without a folder"
    return f"{methods}: {model} on {datamodule}, {length}, {where}"


def has_events(folder: Path) -> bool:
    """Return whether a run writes events of TensorBoard into its folder."""
    return any(folder.glob("events.out.tfevents.*"))


def summaries(trainer: RunContext) -> list[str]:
    """Return the callbacks' texts about a finished run or evaluation."""
    callbacks = [part for part in trainer.callbacks if isinstance(part, Callback)]
    return [text for callback in callbacks if (text := callback.summary_of_fit())]


def round_line(metrics: Mapping[str, float], round_: int, rounds: int, seconds: float) -> str:
    """Return the line of a round: metrics, mean ``seconds`` of a round so far, and the remaining time."""
    texts = [f"{name} {format_value(name, metrics[name])}" for name in names_to_show(metrics)]
    head, rounds_left = f"round {round_}/{rounds - 1}", rounds - 1 - round_
    if "clock/seconds" in metrics:
        head = f"{head}, {metrics['clock/seconds']:.5g} simulated seconds"
    texts.append(f"{seconds:.2g} s a round")
    if rounds_left >= 1:
        texts.append(f"{tqdm.format_interval(seconds * rounds_left)} left")
    return f"{head}: {', '.join(texts)}"


def final_table(history: list[dict[str, float]], seconds: float, rounds_before: int, folder: Path | None) -> str:
    """Return a table of the best and the final value of each metric, the folder of the run, and how to see its curves.

    The run started or resumed in the round ``rounds_before``, ``seconds`` ago.
    """
    all_metrics = {name: value for row in history for name, value in row.items()}
    names = list(dict.fromkeys([*final_names(all_metrics)[:MOST_SHOWN], *names_to_show(all_metrics)]))
    width = max([len(name) for name in names], default=0)
    lines = [f"{'':{width}}  {'best':>10}  {'round':>6}  {'final':>10}"] if names else []
    for name in names:
        value, round_ = best(history, name)
        lines.append(f"{name:{width}}  {value:>10}  {round_:>6}  {final(history, name):>10}")
    number = len(history) - rounds_before
    lines.append(f"{count(number, 'round')} in {tqdm.format_interval(seconds)}")
    if folder is not None:
        files = ("metrics.csv", "config.yaml", "figures", "checkpoints/last.ckpt")
        lines.append(f"{folder}: {', '.join(name for name in files if (folder / name).exists())}")
        if has_events(folder):
            lines.append(f"tensorboard --logdir {folder.parents[1]}")
    return "\n".join(lines)
