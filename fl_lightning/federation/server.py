"""The server of a federation: sends the global state to sites as messages, and aggregates their updates."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.callbacks.base import Callback
from fl_lightning.client.client import LARGEST_WEIGHT, LEAST_WEIGHT, RECALIBRATES, are_exact
from fl_lightning.core.method import overrides
from fl_lightning.core.state import State, select, tensors_by_path
from fl_lightning.core.systems import SystemOutcome
from fl_lightning.core.update import CohortMeans, Totals, VisitFacts
from fl_lightning.core.updates import ClientUpdate
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.engine.cohort_training import Outcome, share_outcome, shared_updates
from fl_lightning.engine.evaluation.evaluator import PHASES
from fl_lightning.engine.evaluation.metric_states import VisitMetrics
from fl_lightning.engine.rounds import evaluate
from fl_lightning.engine.run import Run
from fl_lightning.engine.run_state import state_of_round
from fl_lightning.engine.update_codec import TensorSpec, decode_update
from fl_lightning.federation.data import Sites, SiteSummary
from fl_lightning.federation.framing import LARGEST, BadMessageError, as_records, joined, of_records
from fl_lightning.federation.serialization import (
    check_numbers,
    check_tensors,
    check_update,
    decoded,
    digest_of_state,
    encoded,
)
from fl_lightning.storage.metric_format import is_defined, is_minimized
from fl_lightning.utilities.errors import ClientError, UsageError, require, truncate

# seconds between two polls for answers
LOOK = 0.25
# bytes of a message in addition to its arrays
TEXT_ROOM = 2**24
# maximum length of the name of a class
LONGEST_CLASS = 200
# phases of a visit that sites time
PHASES_OF_A_VISIT = ("load", "data", "forward_backward", "correct", "step", "collect")

# the answer of a node: a message, or the reason for a missing one
Answer = bytes | str

# the link to the sites of the run of this process; set for the duration of the run
link: Any = None


class FlowerLink:
    """Sends messages over Flower's grid, and limits the bytes of an answer."""

    def __init__(self, grid: Any, limit: int = LARGEST) -> None:
        self.grid, self.limit = grid, limit
        # answers to messages that Flower did not accept, by a made-up message number
        self.unsent: dict[str, Answer] = {}

    def nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def send(self, node: int, request: bytes) -> str:
        from flwr.app import Message

        # without a time to live, after which Flower would report a site as lost that is still training
        message = Message(as_records(request), dst_node_id=node, message_type="train")
        try:
            number = next(iter(self.grid.push_messages([message])), None)
            why = "its SuperLink refuses it"
        except Exception as error:  # Flower has no public class for it; a lasting error is raised again by nodes()
            number, why = None, f"{type(error).__name__}: {error}"
        if number is None:
            number = f"unsent-{uuid.uuid4().hex}"
            self.unsent[number] = f"lost: Flower could not send the message; {truncate(why, 300)}"
        return number

    def receive(self, messages: Collection[str]) -> dict[str, Answer]:
        answers = {number: self.unsent.pop(number) for number in messages if number in self.unsent}
        sent = [number for number in messages if number not in answers]
        for message in self.grid.pull_messages(sent) if sent else ():
            number = message.metadata.reply_to_message_id
            if message.has_error():
                answers[number] = f"lost: {message.error.reason or f'error {message.error.code}'}"
                continue
            try:
                answers[number] = of_records(message.content, self.limit)
            except BadMessageError as error:
                answers[number] = str(error)
        return answers


class FlowerBackend:
    """Trains clients at sites: sends the global state to each site of the cohort, and adds up the updates."""

    def __init__(
        self,
        sites: Sites,
        link: Any,
        agreed: str,
        warn: Callable[[str], None],
        on_client_error: str = "raise",
        min_clients: int = 1,
    ) -> None:
        self.sites, self.link, self.agreed, self.warn = sites, link, agreed, warn
        self.strict, self.least = on_client_error == "raise", min_clients
        # by client: the node of its site, and the message that a late site has not answered yet
        self.nodes: dict[int, int] = {}
        self.busy: dict[int, str] = {}
        # the entries of an update, equal at all sites
        self.declared: list[TensorSpec] = []
        self._asked: dict[str, int] = {}
        self._known: set[int] = set()
        # bytes down and up of the last exchange with all sites
        self._bytes = [0, 0]

    # ------------------------------------------------------------------ presence
    def join(self) -> None:
        """Wait up to ``join_within`` seconds for all sites; refuse the run if too few join."""
        hint = "sites are reached through Flower only; start the run by: flwr run APP CONNECTION"
        require(self.link is not None, "data", "Sites", hint)
        end, names = time.monotonic() + self.sites.seconds_to_join, self.sites.names
        while len(self.nodes) < len(names) and time.monotonic() < end:
            self.greet()
            if len(self.nodes) < len(names):
                time.sleep(LOOK)
        missing = [name for k, name in enumerate(names) if k not in self.nodes]
        if missing:
            text = f"{', '.join(missing)} did not join within {self.sites.seconds_to_join:.0f} s"
            least = len(names) if self.strict else self.least
            hint = "start their nodes, or set trainer.on_client_error=skip to begin with the others"
            require(len(self.nodes) >= least, "data.names", missing, f"{text}; {hint}")
            self.warn(f"{text}; they may join later")

    def greet(self) -> None:
        """Announce the run to new nodes, and admit the sites that have answered."""
        connected = self.link.nodes()
        self._known &= {*connected}
        for node in connected:
            if node not in self._known and node not in self.nodes.values():
                self._known.add(node)
                hello = {"kind": "join", "agreed": self.agreed, "names": self.sites.names}
                self._asked[self.link.send(node, joined(encoded(hello), encoded({})))] = node
        for number, answer in self.link.receive([*self._asked]).items():
            node = self._asked.pop(number)
            if isinstance(answer, str):  # the message was lost: greet the node again
                self._known.discard(node)
            try:
                self._admit(node, self._read(answer, LARGEST), connected)
            except BadMessageError as error:
                self._refuse(f"node {node}: {error}")

    def _admit(self, node: int, answer: Mapping[str, Any], connected: Collection[int]) -> None:
        if "refused" in answer or "failed" in answer:
            who = f"site {truncate(repr(answer['name']), 80)}" if "name" in answer else f"node {node}"
            if "refused" in answer:
                self._refuse(f"{who} refuses the run: {answer['refused']}", ends=True)
            else:
                self._known.discard(node)  # greet it again: its worker may still be starting
                self._refuse(f"{who} could not join: {truncate(str(answer['failed']), 500)}")
            return
        try:
            name, facts, entries = answer["name"], answer["facts"], answer["declared"]
            sizes = {str(phase): int(size) for phase, size in facts["evaluation"].items()}
            classes = tuple(truncate(str(text), LONGEST_CLASS) for text in facts["class_names"])
            summary = SiteSummary(int(facts["num_examples"]), int(facts["batches"]), sizes, classes)
            declared = []
            for entry_name, dtype, shape in entries:
                declared.append(TensorSpec(str(entry_name), str(dtype), tuple(map(int, shape))))
            sensible = min(summary.num_examples, summary.batches, *sizes.values()) >= 0
            sensible = sensible and summary.num_examples < 2**40 and {*sizes} <= {*PHASES}
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            raise BadMessageError("its answer is malformed") from None
        if name not in self.sites.names:
            raise BadMessageError(
                f"it claims to be site {truncate(repr(name), 80)}, which is not one of {self.sites.names}"
            )
        k = self.sites.names.index(name)
        if self.nodes.get(k, node) != node and self.nodes[k] in connected:
            raise BadMessageError(f"it and node {self.nodes[k]} both claim to be site {name!r}; the first one is kept")
        earlier_sites = [self.sites.names[j] for j in sorted(self.nodes) if j != k]
        shapes = {entry.name: entry.shape for entry in declared}
        earlier_shapes = {entry.name: entry.shape for entry in self.declared}
        if not sensible or (earlier_sites and shapes != earlier_shapes):
            reference = f"differ from site {earlier_sites[0]!r}" if earlier_sites else "are impossible"
            raise BadMessageError(f"site {name!r} declares sizes or entries that {reference}")
        # a label is the index of its class name
        for j, fact in self.sites.facts.items():
            if j == k or not fact.class_names:
                continue
            if classes and classes != fact.class_names:
                hint = "set the same data.classes at all sites, even if a site has no image of a class"
                text = f"site {name!r} has the classes {', '.join(classes)}, and site {self.sites.names[j]!r} has "
                self._refuse(f"{text}{', '.join(fact.class_names)}; {hint}", ends=True)
                return
            break
        self.nodes[k], self.declared = node, self.declared or declared
        self.sites.facts[k] = summary

    def _refuse(self, text: str, ends: bool = False) -> None:
        """Warn about a refused node; with ``ends``, end a run in which no client may fail."""
        if self.strict and ends:
            raise UsageError(text)
        self.warn(text)

    def present(self, run: Run, round_: int) -> Sequence[int]:
        """Return the sites that are connected and owe no answer."""
        end = time.monotonic() + self.sites.seconds_to_join
        while True:
            for number in self.link.receive([*self.busy.values()]):
                self.busy = {k: late for k, late in self.busy.items() if late != number}
            self.greet()
            connected = {*self.link.nodes()}
            free = sorted(self.nodes.keys() - self.busy.keys())
            available = [k for k in free if self.nodes[k] in connected]
            if len(available) >= self.least or time.monotonic() >= end:
                break
            time.sleep(LOOK)
        if not available:
            raise ClientError(f"round {round_}: no site is connected")
        seeing = [type(method).__name__ for method in run.methods.seeing_updates]
        if seeing and not round_:
            rank_zero_info(f"method={seeing}: the server sees the update of each site by itself")
        run.server.at_sites = True
        facts = [self.sites.facts[k] for k in range(self.sites.num_clients)]
        run.server.num_examples = sum(fact.num_examples for fact in facts)
        return available

    # ------------------------------------------------------------------ a round
    def train(self, run: Run, round_: int, simulated: dict[int, SystemOutcome]) -> tuple[CohortMeans, list[int]]:
        """Send the state to the sites of the cohort, and add up their updates as they arrive."""
        totals, outcome = Totals(run.fabric.device), Outcome(VisitMetrics(run.client.module))
        client, expected, largest = run.client, run.server.state, self.sites.largest_number
        buffers = [name for name in client.sent_others if are_exact(expected[name])]
        own_weights = any(overrides(method, "client_weight") for method in run.methods.methods)
        seconds: list[Mapping[str, float]] = []

        def take(k: int, answer: Mapping[str, Any]) -> None:
            """Validate the answer of a site, and add its update."""
            contents, facts = move_data_to_device(answer.get("update"), run.fabric.device), self.sites.facts[k]
            if not isinstance(contents, dict):
                raise BadMessageError("its answer contains no update")
            check_update(contents, self.declared, client.sent_frozen)
            if "parameters" in contents:
                check_tensors("parameters", contents["parameters"], expected, largest, client.sent)
            check_tensors("buffers", contents.get("buffers"), expected, largest, buffers)
            check_numbers("update", dict(tensors_by_path(contents)), largest)
            if not isinstance(payload := contents.get("payload"), dict) or {*payload} - {*run.methods.names}:
                raise BadMessageError("it sends no payload, or one of an unknown method")
            update = decode_update(contents, {**expected, **own_entries[k]})
            if own_weights:
                fits = update.weight == 0 or LEAST_WEIGHT <= update.weight <= LARGEST_WEIGHT
            else:
                fits = update.weight == (facts.num_examples if run.trainer.weighting == "examples" else 1)
            if not fits:
                raise BadMessageError(f"its weight is {update.weight:g}, which is not valid for this site")
            try:
                steps, rate, skipped = int(answer["steps"]), float(answer["rate"]), int(answer["skipped"])
                scalings = [(float(scale), int(number)) for scale, number in answer["scalings"]]
                of_visit = VisitFacts(steps, rate, skipped, int(answer["lost"]), scalings)
                by_phase = {}
                for phase in PHASES_OF_A_VISIT:
                    by_phase[phase] = float(answer["seconds"].get(phase, 0.0))
                seconds.append(by_phase)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise BadMessageError("its answer lacks the measurements of the visit") from None
            if steps:
                if run.methods.seeing_updates:
                    single = ClientUpdate(k, update.weight, facts.num_examples, steps, 0, update.delta, update.others)
                    of_client = own_entries[k]
                    received = {name: of_client[name] for name in client.sent if name in of_client}
                    outcome.updates[k] = replace(single, payload=update.payload, received=received)
                totals.add(update)
                self.sites.accepted[k] = round_
            outcome.note_visit(k, of_visit, facts.batches == 0)

        run.stopwatch.reset()
        messages, own_entries = {}, {}
        for k in simulated:
            sent = client.lifecycle.sent_to(k)
            own_entries[k] = sent.entries
            memory = {"memory": self.sites.accepted.get(k), "keep": self.sites.kept_rounds(k)}
            messages[k] = {**memory, "state": dict(sent.entries), "extras": sent.extras}
        self._ask(run, "train", expected, messages, take, outcome.errors)
        run.stopwatch.lap("wait")
        arrived = share_outcome(run, round_, outcome)
        means = totals.close()
        means.updates = shared_updates(run, outcome)
        for phase in PHASES_OF_A_VISIT:
            mean = sum(by_phase[phase] for by_phase in seconds) / max(len(seconds), 1)
            run.metrics.update({f"time/{phase}": mean})
        run.metrics.update({"bytes/message/down": self._bytes[0], "bytes/message/up": self._bytes[1]})
        return means, arrived

    def _ask(
        self,
        run: Run,
        kind: str,
        state: Mapping[str, Any],
        client_messages: Mapping[int, Mapping[str, Any]],
        take: Callable[[int, Mapping[str, Any]], None],
        errors: dict[int, Exception],
    ) -> None:
        """Send a message to some sites, and pass each answer to ``take``; collect failures in ``errors`` by client."""
        self.sites.run_id, self._bytes = self.sites.run_id or uuid.uuid4().hex, [0, 0]
        server = run.server
        of_all = [{*message.get("state", ())} for message in client_messages.values()]
        replaced = set.intersection(*of_all) if of_all else set()
        travels = [name for name in run.client.travelling if name not in replaced]
        shared = encoded(
            {
                "kind": kind,
                "run": self.sites.run_id,
                "agreed": hashlib.sha256(self.agreed.encode()).hexdigest(),
                "round": server.round,
                "cohort": server.cohort,
                "num_clients": server.num_clients,
                "num_examples": server.num_examples,
                "state": select(dict(state), travels),
                "rest": digest_of_state(rest_of(run)),
                **state_of_round(run),
                "methods": run.methods.sent_state_dict(),
            }
        )
        seconds, where = self.sites.seconds_to_answer, f"round {server.round}"
        news = {k: select(server.state, server.news_for(k)) for k in client_messages}
        waiting = {}
        for k, client_message in client_messages.items():
            waiting[self._send(k, shared, {**client_message, "rest": news[k]})] = k
        end = None if seconds is None else time.monotonic() + seconds
        limit = TEXT_ROOM + sum(torch.Size(entry.shape).numel() * 8 for entry in self.declared)
        while waiting and (end is None or time.monotonic() < end):
            answers = self.link.receive([*waiting])
            for number, answer in answers.items():
                k = waiting.pop(number)
                self._bytes[1] += 0 if isinstance(answer, str) else len(answer)
                try:
                    contents = self._read(answer, limit)
                    if contents.get("needs") == "whole":
                        waiting[self._send(k, shared, {**client_messages[k], "rest": rest_of(run)})] = k
                        continue
                    if "failed" in contents or "refused" in contents:
                        text = str(contents.get("failed") or f"it refuses: {contents.get('refused')}")
                        raise (UsageError if contents.get("usage") else ClientError)(truncate(text, 500))
                    take(k, contents)
                except (ClientError, UsageError, ArithmeticError) as error:
                    text = f"client {k} (site {self.sites.names[k]}), {where}: {error}"
                    errors[k] = UsageError(text) if type(error) is UsageError else ClientError(text)
            run.workers.check()
            if not answers:
                self.greet()  # a site that joins now takes part in the next round
                time.sleep(LOOK)
        for number, k in waiting.items():
            self.busy[k] = number
            text = f"no answer within {seconds:g} s"
            errors[k] = ClientError(f"client {k} (site {self.sites.names[k]}), {where}: {text}")

    def _send(self, k: int, shared: bytes, client_message: Mapping[str, Any]) -> str:
        message = joined(shared, encoded({"client": k, **client_message}))
        self._bytes[0] += len(message)
        return self.link.send(self.nodes[k], message)

    def _read(self, answer: Answer, limit: int) -> Mapping[str, Any]:
        if isinstance(answer, str):
            raise BadMessageError(answer)
        contents = decoded(answer, limit)
        if not isinstance(contents, dict):
            raise BadMessageError("its answer is malformed")
        return contents

    # ------------------------------------------------------------------ evaluation
    def evaluate(self, run: Run) -> None:
        """Evaluate on the server's own data, or at the sites if it has none or if entries of the state are local."""
        local_models = not run.client.has_global_model
        if not local_models:
            evaluate(run)
        phases = [phase for phase in PHASES if local_models or not run.evaluator.has_data(phase)]
        connected = {*self.link.nodes()}
        requests = {}
        for k in sorted(self.nodes.keys() - self.busy.keys()):
            has_data = not self.sites.facts[k].evaluation.keys().isdisjoint(phases)
            if self.nodes[k] in connected and has_data:
                requests[k] = {"phases": phases, "memory": self.sites.accepted.get(k)}
        if not requests:
            return
        metrics_of: dict[int, dict[str, dict[str, float]]] = {}
        errors: dict[int, Exception] = {}

        def take(k: int, answer: Mapping[str, Any]) -> None:
            try:
                by_phase = {}
                for phase in phases:
                    metrics = answer["metrics"].get(phase, {})
                    by_phase[phase] = {str(tag): float(value) for tag, value in metrics.items()}
                metrics_of[k] = by_phase
            except (KeyError, TypeError, ValueError, AttributeError):
                raise BadMessageError("its metrics are malformed") from None

        with run.metrics.timed("evaluate"):
            self._ask(run, "evaluate", run.methods.evaluated_state(run.server), requests, take, errors)
        for error in errors.values():
            if self.strict:
                raise error
            self.warn(f"not evaluated: {error}")
        for phase in phases:
            values = {}
            for k in sorted(metrics_of):
                size = 1 if local_models else self.sites.facts[k].evaluation.get(phase, 0)
                values[self.sites.names[k]] = (size, metrics_of[k].get(phase, {}))
            run.metrics.update(over_sites(values))


def rest_of(run: Run) -> State:
    """Return the entries of the global state that are not sent in each round, since the sites hold them."""
    travels = {*run.client.travelling}
    return {name: value for name, value in run.server.state.items() if name not in travels}


def over_sites(values: Mapping[str, tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted mean, each site's value and the worst value of metrics, from (weight, metrics) by site."""
    sums, logged = Sums(), dict[str, float]()
    tags: dict[str, list[float]] = {}
    for name, (weight, metrics) in values.items():
        defined = {tag: value for tag, value in metrics.items() if is_defined(tag, value)}
        sums.add({tag: Weighted.of(value, float(weight)) for tag, value in defined.items()})
        for tag, value in defined.items():
            tags.setdefault(tag, []).append(value)
        logged |= {f"sites/{name}/{tag}": value for tag, value in metrics.items()}
    means = {tag: float(mean) for tag, mean in sums.means().items()}
    numbers = {tag: len(several) for tag, several in tags.items()}
    logged |= {f"{tag}/clients": number for tag, number in numbers.items() if number < len(values)}
    for tag, several in tags.items():
        logged[f"sites/worst/{tag}"] = float((np.max if is_minimized(tag) else np.min)(several))
    return {**means, **logged}


def check_suits(trainer: Any) -> None:
    """Refuse arguments that need the clients' data, or that simulate the behaviour of real sites."""
    hint = "a round waits for sites; pass 1 or more"
    require(trainer.min_clients > 0, "trainer.min_clients", trainer.min_clients, hint)
    hint = "it simulates dropout and delays, which real sites have anyway; remove it"
    require(trainer.systems is None, "trainer.systems", type(trainer.systems).__name__, hint)
    require(trainer.clock is None, "trainer.clock", type(trainer.clock).__name__, hint)
    hint = "sites make no extra passes over their data; use average, keep or local"
    require(trainer.buffers not in RECALIBRATES, "trainer.buffers", trainer.buffers, hint)
    hint = "the server does not train; use 1"
    require(str(trainer.devices) == "1" and trainer.num_nodes == 1, "trainer.devices", trainer.devices, hint)
    hint = "it inspects each client after its visit, which takes place at a site; remove it"
    for callback in trainer.callbacks:
        sees = isinstance(callback, Callback) and callback.needs_client_access
        require(not sees, "trainer.callbacks", type(callback).__name__, hint)
