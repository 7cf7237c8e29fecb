"""A site of a federation: a worker that keeps running on the data of one client and answers the server's messages.

It is the only process at the site that reads data. Flower's ClientApp merely relays messages to its socket.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device

from fl_lightning.core.lazy_copies import lazy_copy
from fl_lightning.core.method import SentToClient, is_nested, is_number
from fl_lightning.core.state import num_bytes, tensors_by_path
from fl_lightning.engine.commands.fit import begin_fit, prepare_fit
from fl_lightning.engine.evaluation.evaluator import PHASES, step_name
from fl_lightning.engine.fingerprint import differing
from fl_lightning.engine.run import Run
from fl_lightning.engine.update_codec import TensorSpec, encode_update, list_tensors
from fl_lightning.federation.data import SingleSite
from fl_lightning.federation.framing import BadMessageError, parted, receive, send
from fl_lightning.federation.serialization import (
    check_numbers,
    check_tensors,
    check_update,
    decoded,
    digest_of_state,
    encoded,
    scrubbed,
)
from fl_lightning.storage.atomic_io import load, save
from fl_lightning.storage.serializable import on_cpu
from fl_lightning.training.device_loaders import num_pickable
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import UsageError, count, require

# longest path of a socket, which the system limits
LONGEST_PATH = 100
# length of the id of a run
RUN_ID = 32


class Site:
    """Trains and evaluates the client of a site on request of the server."""

    def __init__(self, run: Run, name: str, agreed: str, folder: Path, largest: float, limit: int) -> None:
        prepare_fit(run, None, None, False)
        begin_fit(run, fresh=True)
        self.run, self.name, self.agreed, self.folder = run, name, agreed, folder
        self.largest, self.limit, self.digest = largest, limit, hashlib.sha256(agreed.encode()).hexdigest()
        self.data: SingleSite = run.data  # type: ignore[assignment]
        # number of examples of each phase, or of batches if examples cannot be counted
        self.evaluation = {}
        for phase in PHASES:
            if run.evaluator.has_data(phase) and step_name(run.client.module, phase) is not None:
                loaders = run.loaders.evaluation(phase)
                sizes = [num_pickable(loader) or len(loader) for loader in loaders]
                self.evaluation[phase] = sum(sizes)
        self.declared = self.declare()
        # what the last message has for this client alone
        self.extras: Mapping[str, Any] = {}
        run.client.lifecycle.sent_to = lambda k: SentToClient({}, self.extras, {})

    def declare(self) -> list[TensorSpec]:
        """List the entries of the client's updates, from a dry run of two visits of one batch each."""
        run, declared = self.run, dict[str, TensorSpec]()
        start = run.server.state
        with run.client.lifecycle.rehearsing(run.methods):
            for round_ in range(min(2, run.trainer.max_rounds)):
                run.worker_module.begin_round(round_)
                run.methods.on_round_start(run.server)
                with patched(run.worker_module.fit_progress, limit=1):
                    update = run.local_training.visit(0, round_, start)
                entries = list_tensors(encode_update(run.client, update))
                declared |= {entry.name: entry for entry in entries}
        run.client.lifecycle.end_round()
        return [entry for entry in declared.values() if not entry.name.startswith("frozen/")]

    # ------------------------------------------------------------------ messages
    def answer(self, request: bytes) -> bytes:
        """Answer a message of the server; an error is reported in the answer, and in full on stderr."""
        try:
            shared, client_message = (decoded(part, self.limit) for part in parted(request))
            if not isinstance(shared, dict) or not isinstance(client_message, dict):
                raise BadMessageError("a message consists of two dictionaries")
            kind = shared.get("kind")
            if kind == "join":
                return encoded(self.join(shared))
            if kind not in ("train", "evaluate"):
                raise BadMessageError(f"unknown kind of message: {kind!r}")
            if shared.get("agreed") != self.digest:
                raise BadMessageError("the server runs another config than this site; restart the run")
            if not self.restore(shared, client_message):
                return encoded({"needs": "whole"})
            respond = self.train if kind == "train" else self.evaluate
            return encoded(respond(shared, client_message))
        except BadMessageError as error:
            return self.refusal(error)
        except (Exception, SystemExit) as error:
            self.tell(f"failed: {error}")
            traceback.print_exception(error, file=sys.stderr)
            return encoded({"failed": scrubbed(error), "usage": isinstance(error, UsageError), "name": self.name})

    def refusal(self, error: BadMessageError) -> bytes:
        self.tell(f"refused: {error}")
        return encoded({"refused": str(error), "name": self.name})

    def join(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the data and the updates of the site, unless the server's config differs."""
        server_agreed = str(message.get("agreed"))
        if server_agreed != self.agreed:
            changes = differing(json.loads(server_agreed), json.loads(self.agreed), "config").items()
            lines = []
            for key, (server_value, site_value) in changes:
                lines.append(f"{key.removeprefix('config.')}: there {server_value!r}, here {site_value!r}")
            text = "; ".join(lines) or "other types"  # such as 1 and 1.0
            raise BadMessageError(f"the server runs another config than this site: {text}")
        self.tell(f"joined a run of {count(len(message.get('names', [])), 'site')}")
        return {
            "name": self.name,
            "facts": asdict(self.data.facts(self.evaluation)),
            "declared": [[entry.name, entry.dtype, list(entry.shape)] for entry in self.declared],
        }

    def restore(self, shared: Mapping[str, Any], client_message: Mapping[str, Any]) -> bool:
        """Set server state and methods to the start of the round; return False if the site lacks part of the state."""
        run, server = self.run, self.run.server
        names = ("round", "num_clients", "num_examples")
        numbers: list[Any] = [*map(shared.get, names), client_message.get("client")]
        counts = all(type(number) is int and 0 <= number < 2**40 for number in numbers)
        cohort: Any = shared.get("cohort")
        listed = isinstance(cohort, list) and all(type(k) is int for k in cohort)
        if not counts or not listed or not 0 <= numbers[0] < max(run.trainer.max_rounds, 1) or not numbers[1]:
            raise BadMessageError("the message has impossible numbers of rounds, clients or examples")
        parts: Any = (shared.get("state"), client_message.get("state", {}))
        are_states = all(isinstance(part, dict) for part in parts)
        state: Any = {**parts[0], **parts[1]} if are_states else None
        unsent = client_message.get("rest", {})
        check_tensors("the state", state, server.state, self.largest, run.client.travelling)
        check_tensors("the rest of the state", unsent, server.state, self.largest, [*unsent])
        methods = shared.get("methods")
        if not isinstance(methods, dict) or {*methods} != {*run.methods.names}:
            raise BadMessageError("the message has states of other methods")
        extras = client_message.get("extras", {})
        if not isinstance(extras, dict) or not {*extras} <= {*methods} or not is_nested(extras, is_number):
            raise BadMessageError("the message has extras of another form")
        check_numbers("a method's values", dict(tensors_by_path({"server": methods, "client": extras})), self.largest)
        self.extras = move_data_to_device(extras, run.fabric.device)
        server.assign(unsent)
        site_entries = {name: value for name, value in server.state.items() if name not in state}
        if digest_of_state(site_entries) != shared.get("rest"):
            return False
        round_, before = numbers[0], (server.num_clients, server.num_examples)
        server.num_clients, server.num_examples = numbers[1], numbers[2]
        server.cohort_size = server.num_clients  # the server has checked the size of its cohorts
        server.begin_round(round_, cohort)
        # hooks may set attributes besides the server's values, which are then loaded from the message, and assign
        frozen = server.frozen & site_entries.keys()
        state = state | {name: lazy_copy(site_entries[name]) for name in frozen}
        if before != (server.num_clients, server.num_examples):
            run.methods.on_fit_start(server)
        for hook in (lambda _: None, run.methods.on_round_start):
            hook(server)
            server.assign(state)
            run.methods.load_state_dict(methods, run.fabric.device)
        server.share(run.client.live)
        run.worker_module.begin_round(round_)
        run.local_training.monitored.load_state_dict(shared.get("client_schedulers", {}))
        run.local_training.scaling = shared.get("scaling") or run.local_training.scaling
        run.worker_module.evaluated = shared.get("evaluated", {})
        return True

    def train(self, shared: Mapping[str, Any], client_message: Mapping[str, Any]) -> dict[str, Any]:
        run, k, round_ = self.run, client_message["client"], shared["round"]
        memories, client = run.client.memories(), run.client
        run.stopwatch.reset()
        with memories.unchanged():
            memories.visited(k).update(move_data_to_device(self.memory(shared, client_message), memories.device))
            update = run.local_training.visit(k, round_, run.server.state)
            contents = encode_update(client, update)
            check_update(contents, self.declared, client.sent_frozen)
            # takes effect when the server names this round: it may never receive the update
            save(on_cpu(memories.get(k, {})), self.file(shared, round_))
            answer = {
                "update": contents,
                **asdict(update.facts),
                "seconds": run.stopwatch.read(),
            }
            client.lifecycle.end_round()
        self.forget(shared, {*client_message.get("keep", []), client_message.get("memory"), round_})
        size = f"{num_bytes(contents):,} bytes of tensors"
        self.tell(f"round {round_}/{run.trainer.max_rounds - 1}: trained, sends {size}")
        return answer

    def evaluate(self, shared: Mapping[str, Any], client_message: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate the global model, or the client's own one, on the site's data."""
        run, k = self.run, client_message["client"]
        entries = self.memory(shared, client_message).get("state", {})
        metrics: dict[str, dict[str, float]] = {}
        phases = client_message.get("phases", [])
        for phase in (phase for phase in phases if phase in self.evaluation):
            if run.client.has_global_model:
                metrics[phase] = run.evaluator.evaluate(phase, run.server.state)
            elif entries:
                evaluated = run.evaluator.evaluate(phase, {**run.server.state, **entries}, client=k)
                metrics[phase] = run.evaluator.means([evaluated])
        self.tell(f"round {shared['round']}/{run.trainer.max_rounds - 1}: evaluated")
        return {"metrics": metrics}

    def report(self, path: Path) -> str:
        """Describe where the site listens, and the data that leave it."""
        facts = self.data.facts(self.evaluation)
        lines = []
        for entry in self.declared:
            lines.append(f"{entry.name}  {entry.dtype} {entry.shape}  {entry.num_bytes:,} bytes")
        total = sum(entry.num_bytes for entry in self.declared)
        facts_told = f"its name, {facts.num_examples} examples in {facts.batches} batches"
        for phase, size in self.evaluation.items():
            facts_told += f", {size} examples of {phase} data"
        facts_told += f", its classes {', '.join(facts.class_names)}" if facts.class_names else ""
        headline = f"site {self.name} is ready, at {path.absolute()}; it reports to the server {facts_told}"
        sent = f"it sends in each round {total:,} bytes in {len(lines)} entries, its weight, and means of logged values"
        return "\n  ".join([headline, sent, *lines])

    # ------------------------------------------------------------------ memory of the client
    def file(self, shared: Mapping[str, Any], round_: int) -> Path:
        """Return the path of the client's memory after its visit in a round of a run."""
        run_id = shared.get("run")
        if not isinstance(run_id, str) or len(run_id) != RUN_ID or not run_id.isalnum():
            raise BadMessageError("the id of the run is malformed")
        return self.folder / run_id / f"{int(round_)}.pt"

    def memory(self, shared: Mapping[str, Any], client_message: Mapping[str, Any]) -> dict[str, Any]:
        """Load the client's memory after the last visit whose update the server received; empty before the first."""
        last_round = client_message.get("memory")
        if last_round is None:
            return {}
        path = self.file(shared, last_round)
        if not path.is_file():
            stored_rounds = sorted(int(file.stem) for file in path.parent.glob("*.pt"))
            raise BadMessageError(
                f"this site lacks the memory after round {last_round}; it has the rounds {stored_rounds}"
            )
        return load(path)

    def forget(self, shared: Mapping[str, Any], keep: set[Any]) -> None:
        """Remove the memories that the server will not request."""
        for path in self.file(shared, 0).parent.glob("*.pt"):
            if int(path.stem) not in keep:
                path.unlink(missing_ok=True)

    def tell(self, text: str) -> None:
        print(f"site {self.name}: {text}", file=sys.stderr, flush=True)


def answer_messages(run: Run, weights: None, socket: Path, **how: Any) -> None:
    """Answer messages on a socket, one at a time, until the process ends."""
    site = Site(run, **how)
    with listening(socket) as server:
        print(site.report(socket), flush=True)
        while True:
            connection, _ = server.accept()
            with connection, suppress(ConnectionError):  # the relay may have ended
                try:
                    request = receive(connection, site.limit)
                except BadMessageError as error:
                    send(connection, site.refusal(error))
                else:
                    send(connection, site.answer(request))


def listening(path: Path) -> socket.socket:
    """Listen on a socket that only this user may open, and replace the socket of an ended process."""
    hint = f"the path of a socket is limited to {LONGEST_PATH} characters; pass a shorter one"
    require(len(str(path)) <= LONGEST_PATH, "socket", str(path), hint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as probe:
        in_use = probe.connect_ex(str(path)) == 0
    require(not in_use, "socket", str(path), "another worker listens there; end it, or pass another path")
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(before)
    server.listen(8)
    return server
