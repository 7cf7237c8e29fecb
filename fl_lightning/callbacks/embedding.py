"""Representations of test images in two dimensions, as in FedUV's Figure 4 and FedLC's Figure 7.

FedUV: Son et al., CVPR 2024. https://arxiv.org/abs/2402.18372. FedLC: Zhang et al., ICML 2022.
https://arxiv.org/abs/2209.00189. t-SNE: van der Maaten and Hinton, JMLR 2008.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.callbacks.measurement import Measurement, merge_sorted, require_test_data
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.client.taps import resolve_taps, with_paths
from fl_lightning.core.seeding import derive_seed
from fl_lightning.core.state import State
from fl_lightning.utilities.errors import require

# labels (n,) and representations (n, d) of each batch, by (loader, batch)
Probe = dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
# number of embedded clients by default
CLIENTS = 2


def require_among(key: str, ids: Sequence[int] | None, allowed: Collection[int], hint: str) -> None:
    """Refuse unknown ids in an argument of :class:`Embedding`."""
    missing = [id_ for id_ in ids or () if id_ not in allowed]
    require(not missing, f"Embedding.{key}", missing, hint)


class Embedding(Measurement):
    """Draws the representations of a probe of the test data in two dimensions, by t-SNE.

    The figure ``embedding/classes`` has a panel with a separate embedding for the global model and for each local model
    before aggregation, coloured by class; the legend of a client shows its number of training examples of each class.
    The figure ``embedding/clients`` is a joint embedding of all these models, coloured by model. TensorBoard's
    projector receives the representations, with class and model of each point.

    ``embedding.npz`` holds ``rounds`` (R,), ``labels`` (R, n), ``clients`` (R, K), the ids, or -1,
    ``global`` (R, n, 2), ``local`` (R, K, n, 2) and ``joint`` (R, K + 1, n, 2), the global model first; nan for a
    missing model.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1, and in the last round; None measures
            only in the last round.
        tap: name of a tap, or path of a submodule as in ``trainer.taps``, whose output is embedded.
        examples: number of test images in the probe, at least 8; None is all test data.
        clients: ids of clients whose local models are embedded in the rounds in which they take part; None for the 2
            lowest ids of each round, an empty list for no clients.
        classes: embedded classes; None for all. FedUV shows one class, FedLC three.
        perplexity: perplexity of t-SNE, the effective number of neighbours, above 0. With few points, it is lowered to
            a third of their number.

    If entries of the state stay with the clients (FedBN, FedProto), only the clients' models are embedded. If
    ``EarlyStopping`` ends a run in a round without a measurement, only the global model is embedded.

    Raises:
        UsageError: an argument out of its range, an unknown tap, no test data, or data without labels.
    """

    file = "embedding.npz"

    def __init__(
        self,
        every_n_rounds: int | None = None,
        tap: str = "representation",
        examples: int | None = 512,
        clients: list[int] | None = None,
        classes: list[int] | None = None,
        perplexity: float = 30.0,
    ) -> None:
        super().__init__(every_n_rounds)
        hint = "use 8 or more, or null for all test data"
        require(examples is None or examples >= 8, "Embedding.examples", examples, hint)
        require(classes is None or len(classes) > 0, "Embedding.classes", classes, "name a class, or use null")
        require(perplexity > 0, "Embedding.perplexity", perplexity, "use a number above 0")
        self.tap, self.examples, self.clients, self.classes = tap, examples, clients, classes
        self.perplexity = perplexity

    def setup(self, trainer: RunContext) -> None:
        module, number = trainer.client.module, trainer.data.num_clients
        extra = with_paths(module, trainer.taps, [self.tap])
        resolve_taps(module, extra, {self.tap: type(self).__name__})
        require_among("clients", self.clients, range(number), f"use ids from 0 to {number - 1}")
        counts = trainer.data.info(0).label_counts
        if counts is not None:
            require_among("classes", self.classes, range(len(counts)), f"use classes from 0 to {len(counts) - 1}")
        require_test_data(trainer, self)

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        # fails for a submodule that the forward does not call, and for data without labels
        probe = trainer.representations(None, (self.tap,), examples=self.examples)
        worker_labels = [None if targets is None else targets.tolist() for *_, targets, _ in probe]
        batches = [labels for of_worker in trainer.gather(worker_labels) for labels in of_worker]
        require(None not in batches, "Embedding with the data", type(trainer.data).__name__, "it needs labels")
        classes = {c for labels in batches for c in labels or ()}
        hint = f"use classes of the probe: {', '.join(map(str, sorted(classes)))}"
        require_among("classes", self.classes, classes, hint)

    def on_round_start(self, trainer: RunContext) -> None:
        self._local: dict[int, Probe] = {}
        cohort = sorted(trainer.server.cohort)
        self._embedded = cohort[:CLIENTS]
        if self.clients is not None:
            self._embedded = [k for k in self.clients if k in cohort]

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        if self.due(trainer.server.round) and client.info.id in self._embedded:
            self._local[client.info.id] = self._probe(trainer, client.state())

    def on_last_round_end(self, trainer: RunContext) -> None:
        if not self.due(trainer.server.round):
            self.measure(trainer)

    def measure(self, trainer: RunContext) -> None:
        # the batches of each client, and of the global model as None
        worker_probes: dict[int | None, Probe] = dict(self._local.items())
        if trainer.client.has_global_model:
            worker_probes[None] = self._probe(trainer, None)
        parts = trainer.gather(worker_probes)
        self._local = {}
        probes = {}
        for k in {k: None for part in parts for k in part}:
            probes[k] = merge_sorted(part[k] for part in parts if k in part)
        ids = sorted(k for k in probes if k is not None)
        # t-SNE is slow, so only the worker that writes computes it
        if trainer.run_dir is not None and probes:
            named = {"global": probes[None]} if None in probes else {}
            named |= {f"client {k}": probes[k] for k in ids}
            models = {}
            for name, probe in named.items():
                labels, z = (np.concatenate(part) for part in zip(*probe.values(), strict=True))
                selected = slice(None) if self.classes is None else np.isin(labels, self.classes)
                models[name] = labels[selected], z[selected]
            self._embed(trainer, models, ids)

    def _embed(self, trainer: RunContext, models: Mapping[str, tuple[np.ndarray, np.ndarray]], ids: list[int]) -> None:
        labels = next(iter(models.values()))[0]
        width = min(CLIENTS, trainer.data.num_clients) if self.clients is None else len(self.clients)
        seed = derive_seed(trainer.seed, "embedding") % 2**32
        separate_points = np.stack([embed(z, self.perplexity, seed) for _, z in models.values()])
        all_rows = np.concatenate([z for _, z in models.values()])
        joint_points = embed(all_rows, self.perplexity, seed)
        # the global model first, then the clients; nan for a missing model
        start = 0 if "global" in models else 1
        separate, joint = np.full((2, width + 1, len(labels), 2), np.nan)
        separate[start : start + len(models)] = separate_points
        joint[start : start + len(models)] = np.split(joint_points, len(models))
        clients = np.array([*ids, *[-1] * (width - len(ids))], dtype=np.int64)
        measured = {"global": separate[0], "local": separate[1:], "joint": joint, "labels": labels, "clients": clients}
        self.keep(trainer, measured)
        counts = [None, *(trainer.data.info(k).label_counts for k in ids)][start:]
        texts = []
        for of_model in counts:
            if of_model is None:
                texts.append([str(label) for label in labels])
            else:
                texts.append([f"{label} ({int(of_model[label])})" for label in labels])
        parts = np.stack(np.split(joint_points, len(models)))
        drawn = {"models": np.array(list(models)), "apart": separate_points, "held": np.array(texts), "together": parts}
        self.draw(trainer, drawn)
        project(trainer.summary_writers, models, trainer.server.round)

    def on_fit_end(self, trainer: RunContext) -> None:
        """The figures are drawn with each measurement."""

    def _probe(self, trainer: RunContext, state: State | None) -> Probe:
        batches = trainer.representations(state, (self.tap,), examples=self.examples)
        probe = {}
        for index, _, targets, taps in batches:
            if targets is not None:
                z = taps[self.tap].flatten(1).float().cpu().numpy()
                probe[index.loader, index.batch] = targets.cpu().numpy(), z
        return probe


def embed(z: np.ndarray, perplexity: float, seed: int) -> np.ndarray:
    """Return t-SNE of representations ``(n, d)`` in two dimensions, ``(n, 2)``.

    Fewer than 4 points, equal ones and those of a diverged model give zeros.

    It runs on one thread, since sums over several threads are not reproducible bit for bit.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if len(z) < 4 or not 0 < np.ptp(z, 0).max() < 1e18:  # squares of larger ones overflow
        return np.zeros((len(z), 2))
    with threadpool_limits(1):
        tsne = TSNE(perplexity=min(perplexity, (len(z) - 1) / 3), init="pca", random_state=seed)
        return tsne.fit_transform(z).astype(np.float64)


def project(writers: Sequence[Any], models: Mapping[str, tuple[np.ndarray, np.ndarray]], round_: int) -> None:
    """Send the representations to TensorBoard's projector, with class and model of each point."""
    rows = [[str(c), name] for name, (labels, _) in models.items() for c in labels]
    z = np.concatenate([z for _, z in models.values()])
    for writer in writers:
        file = Path(writer.get_logdir()) / "projector_config.pbtxt"
        before = file.read_text() if file.is_file() else ""
        writer.add_embedding(z, rows, global_step=round_, tag="embedding", metadata_header=["class", "model"])
        if before:  # in a resumed run, the writer does not know the earlier rounds
            listed = re.findall(r"^embeddings \{.*?^\}\n", before + file.read_text(), re.DOTALL | re.MULTILINE)
            file.write_text("".join(dict.fromkeys(listed)))
