"""A group: the visits of several clients side by side, each step of theirs one program over stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from fl_lightning.client import Client
from fl_lightning.client.client import LARGEST_INTEGER, are_exact
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.lightning.module_snapshot import StateBinding
from fl_lightning.client.visit import TrainingBatch, Visit
from fl_lightning.core.reduced import Reduced
from fl_lightning.core.seeding import generator_states, rng_scope
from fl_lightning.core.state import State, norm
from fl_lightning.core.update import Update
from fl_lightning.core.weighted import Weighted, weigh_rows
from fl_lightning.training.local_training import LocalTraining, take_step
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import ClientError, LostWorkerError, Stopped, UsageError, with_location
from fl_lightning.vectorized.batched_tree import (
    BatchedTree,
    Column,
    LeafSpec,
    kind_of,
    numbers_of,
    put_together,
    table_of,
    take_apart,
)
from fl_lightning.vectorized.group_loader import GroupBatch, GroupLoader
from fl_lightning.vectorized.group_log import GroupLog, row_of
from fl_lightning.vectorized.one_client import mapped_gradient, start_visit
from fl_lightning.vectorized.op_trace import Recordings
from fl_lightning.vectorized.stacked_state import StackedState
from fl_lightning.vectorized.values_held import values_held
from fl_lightning.vectorized.vmap_step import Results, StepPhase, VmapStep, namespaces_of
from fl_lightning.vectorized.vmap_views import not_mappable

# numbers in the states of a group beyond which its updates are computed sequentially, to save memory
MOST_NUMBERS = 2**24


class GroupMember(NamedTuple):
    """A client of a group, with fewer epochs (or steps, where the run counts them) than a whole visit as ``work``."""

    id: int
    work: int | None = None


class Group:
    """Trains the clients of a group side by side.

    Args:
        training: local training of one client.
        members: the clients, clients with most batches first.
        round_: number of the round.
        received: the global state.
        recordings: the programs of earlier groups.

    Attributes:
        errors: the error of each client that failed, by row.
        visits: the visits that the methods have started, by row.
        received_own: entries of the received state in which clients may differ ``(G, ...)``, by name.
        shared: frozen parameters, equal for all clients, by name.
        settings: settings of the optimizer on which a step may depend.
    """

    def __init__(
        self,
        training: LocalTraining,
        members: Sequence[GroupMember],
        round_: int,
        received: State,
        recordings: Recordings | None = None,
    ) -> None:
        self.training, self.members, self.round, self.received = training, members, round_, received
        self.recordings = Recordings() if recordings is None else recordings
        self.client: Client = training.client
        self.device = training.fabric.device
        self.size = len(members)
        self.infos = [training.loaders.data.info(member.id) for member in members]
        self.errors: dict[int, Exception] = {}
        self.counts: dict[str, Column] = {}
        for name, zero in {"num_steps": 0, "lr": 0.0, "lr_total": 0.0}.items():
            self.counts[name] = Column(np.array([zero] * self.size), self.device)
        self.num_steps, self.lr = self.counts["num_steps"].values, self.counts["lr"].values
        self._taken, self.num_skipped = np.zeros((2, self.size), dtype=np.int64)
        self.log = GroupLog(self.client.module, self.size)
        # of each pass, the means of the loss's terms
        self._epochs: list[dict[str, Reduced]] = []
        self.visits: dict[int, Visit] = {}
        # of the values that the methods keep for each client: their tables, and which of them it is
        self._tables: dict[str, BatchedTree] = {}
        self._kinds = np.zeros(self.size, dtype=np.int64)
        self._epoch, self.settings = 0, ""
        hooks = self.client.methods.overriding
        self._prepares, self._corrects = training.prepares(), bool(hooks("on_after_optimizer_step"))
        # whether clients at different indices of their passes take separate steps
        self._splits_by_index = False

    # ------------------------------------------------------------------ the visits
    @contextmanager
    def training_all(self) -> Iterator[None]:
        """Train all clients; in the context, each of their visits can be observed.

        Raises:
            ClientError: a failure that cannot be attributed to one client.
        """
        training, client = self.training, self.client
        ids = [member.id for member in self.members]
        with client.lifecycle.attributes_restored():
            try:
                with rng_scope(training.loaders.seed, "group", self.round, *ids[:1]), client.worker_module.training():
                    self._train()
            except (LostWorkerError, Stopped):
                raise
            except (Exception, SystemExit) as error:
                whose = f"round {self.round}: clients {', '.join(map(str, sorted(ids)))} cannot train side by side"
                raise ClientError(f"{whose}: {with_location(error)}") from error
            finally:
                training.stopwatch.lap("collect")
            yield

    def _train(self) -> None:
        training, client = self.training, self.client
        training.stopwatch.start()
        with ExitStack() as stack:
            contexts = [training.loaders.train(member.id, self.round) for member in self.members]
            loaders = [*map(stack.enter_context, contexts)]
            fit_progress = client.worker_module.fit_progress
            self.progresses: list[FitProgress] = [
                fit_progress.at(self.round, len(loader), member.work)
                for loader, member in zip(loaders, self.members, strict=True)
            ]
            client.worker_module.trainer_shim.fit_progress = self.progresses[0]
            client.worker_module.load_and_reset(self.received)
            # buffers outside the state: each visit starts with their values at the start of the run
            state_ids = {id(value) for value in client.live.values()}
            self._apart: State = {}
            for path, value in client.module.named_buffers():
                if id(value) not in state_ids:
                    self._apart[f"buffer {path}"] = value
            self.places = StateBinding(client.module, {**client.live, **self._apart})
            optimizer, schedulers = training.begin_optimizer(training.lr_factors[self.round], None)
            self._begin(optimizer)
            attributes = values_held(
                client.module, client.methods.methods, [*client.live.values(), *self._apart.values()]
            )
            self.recordings.begin_group(self.round, attributes)
            try:
                feed = GroupLoader(training.loaders, loaders, self.device)
                training.stopwatch.lap("load")
                self._take_steps(feed, optimizer, schedulers)
                self.errors |= feed.failed
            finally:
                self.stack.release()
            training.stopwatch.lap("step")

    def _take_steps(self, feed: GroupLoader, optimizer: Any, schedulers: Any) -> None:
        training = self.training
        passes = [fit_progress.passes_now for fit_progress in self.progresses]
        for row in self.errors:
            passes[row] = []
        for epoch in range(max(map(len, passes), default=0)):
            self._epoch = epoch
            lengths = [numbers[epoch] if epoch < len(numbers) else 0 for numbers in passes]
            for batch in feed.of_pass(lengths):
                training.workers.check()
                training.stopwatch.lap("data")
                self._program(batch, optimizer)
                training.stopwatch.lap("step")
            if schedulers:  # those that step once an epoch
                fit_progress = self.client.worker_module.trainer_shim.fit_progress
                fit_progress.epoch, fit_progress.step = epoch, int(self._taken[0])
                training.schedules.after_batch(schedulers, 0, stepped=False, last=True)
                self.note_settings()
            self._epochs.append(self.log.end_epoch())

    # ------------------------------------------------------------------ the beginning
    def _begin(self, optimizer: Any) -> None:
        """Let the methods start each visit, and stack the clients' values."""
        client, size = self.client, self.size
        hooks = ("on_client_start", "sent_state", "sent_extras", "start_state")
        starts = client.kept or any(map(client.methods.overriding, hooks))
        beginnings = [self._start(row) if starts else ({}, {}, {}) for row in range(size)]
        # a frozen parameter that stays with nobody is the same for all, and a step may not change it
        alike = {name for name in client.frozen if name not in client.kept}
        self.shared = {name: self.received[name] for name in alike}
        begins = {**{n: v for n, v in self.received.items() if n not in alike}, **self._apart}
        state = {name: value.expand(size, *value.shape).clone() for name, value in begins.items()}
        for row, (entries, *_) in enumerate(beginnings):
            for name, value in entries.items():
                state[name][row] = value
        own_names = {*client.kept}.union(*(entries for entries, *_ in beginnings))
        self.received_own = {name: state[name].clone() for name in state if name in own_names and starts}
        for row, (_, moved, _) in enumerate(beginnings):
            for name, value in moved.items():
                if name in alike:
                    raise not_mappable(f"client.live[{name!r}]", "on_client_start changes a frozen parameter")
                state[name][row] = value
        self.stack: StackedState = StackedState(state, client.trainable, client.live, optimizer)
        # a step of these depends on the number of earlier steps, which is then equal for clients that take it together
        dampened = any(group.get("dampening") for group in optimizer.param_groups)
        self._counts_steps = type(optimizer) is not SGD or dampened
        self.note_settings()
        self._set_tables([references for *_, references in beginnings])

    def _start(self, row: int) -> tuple[State, State, dict[str, Any]]:
        """Begin one client's visit; see :func:`start_visit`."""
        member, seed = self.members[row], self.training.loaders.seed
        try:
            with rng_scope(seed, "train", self.round, member.id):
                visit, entries, moved, references = start_visit(
                    self.client, self.infos[row], self.received, self.progresses[row]
                )
        except (UsageError, LostWorkerError, Stopped):
            raise
        except Exception as error:
            self.errors[row] = error
            return {}, {}, {}
        self.visits[row] = visit
        return entries, moved, references

    def _set_tables(self, references: Sequence[dict[str, Any]]) -> None:
        """Return a table for each structure of the methods' scratch; most methods have one."""
        shapes: dict[str, Any] = {}
        by_kind: dict[str, dict[int, list[Any]]] = {}
        for row, info in enumerate(self.infos):
            leaves: list[Any] = [info.num_examples, *([] if info.label_counts is None else [info.label_counts])]
            about = {"num_examples": LeafSpec(0), "label_counts": None if info.label_counts is None else LeafSpec(1)}
            namespaces = self.visits[row].scratch if row in self.visits else {}
            scratch = take_apart({name: vars(namespaces[name]) for name in namespaces}, leaves)
            shape = {"info": about, "scratch": scratch, "references": take_apart(references[row], leaves)}
            kind = kind_of(shape, leaves) if self.visits else ""
            shapes[kind] = shape
            by_kind.setdefault(kind, {})[row] = leaves
        for place, (kind, rows) in enumerate(by_kind.items()):
            self._tables[kind] = table_of(shapes[kind], rows, self.size, self.device)
            self._kinds[list(rows)] = place

    # ------------------------------------------------------------------ a step
    def _program(self, batch: GroupBatch, optimizer: Any) -> None:
        """The step of the clients of a batch: one for all that can take it together."""
        rows = batch.rows
        must_agree = [self._kinds[rows]]
        if self._counts_steps:
            must_agree += [moves[rows] for moves in self.stack.moves.values()]
        differs = len({*batch.indices}) > 1
        if self._splits_by_index and differs:
            must_agree.append(np.array(batch.indices))
        if all((values == values[0]).all() for values in must_agree):
            try:
                self._step(batch, optimizer)
            except RuntimeError:
                # the module may use the index as a number, which it can do where the clients have the same
                if self._splits_by_index or not differs:
                    raise
                self._splits_by_index = True
                self._program(batch, optimizer)
            return
        numbers, places = numbers_of(rows, self.size), dict[tuple[int, ...], list[int]]()
        for place, key in enumerate(zip(*(values.tolist() for values in must_agree), strict=True)):
            places.setdefault(key, []).append(place)
        for places_of_key in places.values():
            self._step(batch.part(places_of_key, numbers), optimizer)

    def _step(self, batch: GroupBatch, optimizer: Any) -> None:
        training, rows = self.training, batch.rows
        mounted = self.stack.mount(rows)
        self._states = generator_states() if self.client.methods.needs_gradients else None
        for tensor in mounted.values():  # as zero_grad does, in less time
            tensor.grad = None
        if not self._compute_gradients(batch, mounted):
            self.num_skipped[rows] += 1
        self._taken[rows] += 1
        training.stopwatch.lap("forward_backward")
        if all(mounted[name].grad is None for name in self.client.trainable):
            return
        with torch.no_grad():
            if self._prepares:
                self._mapped_hooks("preparation", batch, mounted, optimizer, self._prepare)
                training.stopwatch.lap("correct")
            take_step(optimizer)
            self.stack.note_step()
            rate = optimizer.param_groups[0]["lr"]
            self.lr[rows] = rate
            self.counts["lr_total"].values[rows] += rate
            if self._corrects:
                self._mapped_hooks("correction", batch, mounted, optimizer, self._correct)
            self.num_steps[rows] += 1

    def _prepare(self, optimizer: Any) -> None:
        """As a visit of one client prepares its gradients, in which a mapped function sees each client's own."""
        client, setting = self.client, self.client.worker_module.trainer_shim.setting
        client.methods.call("on_before_optimizer_step", client, optimizer)
        if setting.gradient_clip_val is not None:
            limit = setting.gradient_clip_val
            trained = [client.live[name] for names in self.stack.optimized for name in names]
            if setting.gradient_clip_algorithm == "value":
                for parameter in trained:
                    if parameter.grad is not None:
                        parameter.grad.copy_(parameter.grad.clamp(-limit, limit))  # torch.vmap has no rule for clamp_
            else:
                clip_grad_norm_(trained, limit, foreach=False)  # it leaves out what has no gradient
        client.methods.call("on_after_clipping", client, optimizer)

    def _correct(self, optimizer: Any) -> None:
        self.client.methods.call("on_after_optimizer_step", self.client, optimizer)

    def _compute_gradients(self, batch: GroupBatch, mounted: State) -> bool:
        """Compute the gradients of the clients; False where the module skips the batch."""
        client = self.client
        columns, about, of_one = self._arguments(batch)

        def work(leaves: list[Any]) -> Results:
            batch_of_one, index = of_one(leaves)
            client.visit.logged.begin_batch(batch_of_one)
            loss = client.training_step(batch_of_one, index)
            return {} if loss is None else {"loss": loss.reshape(())}

        def backward(results: Results, mounted: State) -> State:
            if (losses := results.get("loss")) is None:
                return {}
            self.training.fabric.backward(losses.sum())
            gradients = {name: mounted[name].grad for name in client.trainable}
            return {name: gradient for name, gradient in gradients.items() if gradient is not None}

        part = StepPhase("gradients", about, columns, work, backward)
        return bool(VmapStep(self, batch.rows, mounted, part).results())

    def _arguments(self, batch: GroupBatch) -> tuple[list[Any], Any, Callable[[list[Any]], tuple[Any, Any]]]:
        """A batch as arguments of a mapped step: their columns, what else they depend on, and how to read them."""
        table, differs = batch.table, len({*batch.indices}) > 1
        columns = [column.take(slice(0, None)) for column in table.columns]
        # filled on the device: a copy from the host would wait
        indices = [torch.full((), index, device=self.device) for index in batch.indices]
        columns.append((torch.stack(indices), True) if differs else (indices[0], False))
        return columns, (repr(table.shape), differs), lambda leaves: (put_together(table.shape, leaves), leaves[-1])

    def _mapped_hooks(
        self, name: str, batch: GroupBatch, mounted: State, optimizer: Any, hooks: Callable[[Any], None]
    ) -> None:
        """Run hooks of the methods that change gradients or parameters."""
        trained = [name for name in self.client.trainable if mounted[name].grad is not None]
        columns = [(mounted[name].grad, True) for name in trained]
        again, about, of_one = self._arguments(batch) if self._states is not None else ([], None, None)

        def work(leaves: list[Any]) -> Results:
            client, live = self.client, self.client.live
            gradients = dict(zip(trained, leaves, strict=False))
            for name, gradient in gradients.items():
                live[name].grad = gradient
            self.stack.fill_groups(live)
            if of_one is not None:
                client.visit.present = TrainingBatch(*of_one(leaves[len(trained) :]), states=self._states)
            with patched(client.extra_passes, compute=partial(mapped_gradient, client, self.places)):
                hooks(optimizer)
            changed = [name for name in live if live[name].grad is not gradients.get(name)]
            return {name: live[name].grad for name in changed}

        try:
            part = StepPhase(name, (*trained, about), [*columns, *again], work)
            results = VmapStep(self, batch.rows, mounted, part).results()
        finally:
            self.stack.fill_groups(mounted)
        for name, gradient in results.items():
            mounted[name].grad = gradient

    def note_settings(self) -> bool:
        """Store the optimizer's rates and other settings; return whether they changed."""
        groups = self.stack.optimizer.param_groups
        before, settings = self.settings, [{**group, "params": None} for group in groups]
        self.settings = repr(settings)
        return self.settings != before

    def table_of(self, row: int) -> tuple[str, BatchedTree]:
        """Return the table of the methods' scratch for a client, and its distinguishing key."""
        return [*self._tables.items()][self._kinds[row]]

    def fit_progress(self, row: int) -> FitProgress:
        """The present progress of a client."""
        return replace(self.progresses[row], epoch=self._epoch, step=int(self._taken[row]))

    # ------------------------------------------------------------------ the end
    def update(self, row: int) -> Update:
        """Return a client's update.

        Raises:
            ClientError: the client failed.
            UsageError: parts of the update do not fit together.
        """
        whose = f"client {self.members[row].id}, round {self.round}"
        try:
            if row in self.errors:
                raise self.errors[row]
            with rng_scope(self.training.loaders.seed, "end", self.round, self.members[row].id):
                self.present(row)
                return self.client.lifecycle.finish()
        except (UsageError, LostWorkerError, Stopped):
            raise
        except (Exception, SystemExit) as error:
            raise ClientError(f"{whose}: {with_location(error)}") from error

    def sends_states_alone(self) -> bool:
        """Return whether no hook needs a trained client, so that updates can be computed side by side."""
        client, hooks = self.client, self.client.methods.overriding
        ends = hooks("on_client_end") or hooks("transform_client_update") or hooks("client_weight")
        return not (self.received_own or ends or self.size * client.worker_module.numel > MOST_NUMBERS)

    @torch.no_grad()
    def updates(self) -> tuple[list[int], dict[str, Any], dict[str, Reduced]]:
        """Return the rows of the clients that did not fail, their updates without payloads, and logged extremes.

        The updates are as in :meth:`~fl_lightning.core.update.Update.weighted`, with a row for each client.
        """
        client, state, received = self.client, self.stack.state, self.received
        change = {name: state[name].double() - received[name].double() for name in client.trainable}
        # with the bits that each would have by itself
        changes = [{name: change[name][row] for name in change} for row in range(self.size)]
        drift = torch.stack([*map(norm, changes)])
        fine = self.log.without_bad_terms() & (self.num_steps > 0)
        good = drift.isfinite() & torch.from_numpy(fine).to(drift.device)
        for name in client.others:
            if name in state and state[name].is_floating_point():
                good &= (state[name].isfinite() | ~self.received[name].isfinite()).reshape(self.size, -1).all(1)
            elif name in state and state[name].dtype == torch.int64:
                exact = state[name].clamp(-LARGEST_INTEGER, LARGEST_INTEGER) == state[name]
                good &= exact.reshape(self.size, -1).all(1) & are_exact(self.received[name])
        rows = [row for row, fine in enumerate(good.tolist()) if fine and row not in self.errors]
        row_index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        weighted = client.weighting == "examples"
        of_rows = [float(self.infos[row].num_examples) if weighted else 1.0 for row in rows]
        weights = torch.tensor(of_rows, dtype=torch.float64, device=self.device)
        ones = torch.ones_like(weights)
        size = sum(client.live[name].nbytes for name in (*client.sent, *client.sent_others))
        logged, extremes = self.log.weighted(rows)
        updates = {
            "clients": Weighted(ones, ones),
            "drift": Weighted(drift[row_index] * weights, weights),
            "delta": {name: weigh_rows(change[name][row_index], weights) for name in client.sent},
            "others": {n: weigh_rows(state[n][row_index], weights) for n in client.sent_others},
            "bytes": Weighted(ones * size, ones),
            "logged": logged,
        }
        return rows, updates, extremes

    def present(self, row: int) -> None:
        """Put one client, whose visit has ended, into this worker's module, as if it had trained there alone."""
        client, visit = self.client, self.visits.get(row)
        if visit is None:
            visit = client.lifecycle.begin(self.infos[row], self.received, self.progresses[row])
        logged = visit.logged
        state = {name: values[row] for name, values in self.stack.state.items()}
        client.worker_module.load({**self.received, **state})
        self.log.fill(logged, row)
        client.worker_module.log_into(logged)
        _, table = self.table_of(row)
        leaves = [column.row(row) for column in table.columns]
        visit.scratch = namespaces_of(put_together(table.shape, leaves)["scratch"])
        counts = {name: column.row(row) for name, column in self.counts.items()}
        visit.counts = SimpleNamespace(**counts)
        passes = len(self.progresses[row].passes_now)
        visit.epochs = []
        for epoch in self._epochs[:passes]:
            terms = {name: row_of(term, row) for name, term in epoch.items()}
            visit.epochs.append({name: term for name, term in terms.items() if term.weight})
        visit.num_skipped = int(self.num_skipped[row])
        visit.fit_progress = client.worker_module.trainer_shim.fit_progress = replace(
            self.fit_progress(row), epoch=passes
        )
        client.visit = visit
