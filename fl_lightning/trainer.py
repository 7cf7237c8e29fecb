"""The trainer: the arguments and the commands of a run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.loggers import CSVLogger
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning.pytorch import LightningDataModule, LightningModule

from fl_lightning.core.method import Method, MethodList
from fl_lightning.core.sampling import UniformSampler
from fl_lightning.core.seeding import base_seed
from fl_lightning.engine import validation
from fl_lightning.engine.argument_checks import as_list
from fl_lightning.engine.commands import doctor as examination
from fl_lightning.engine.commands import evaluate as evaluating
from fl_lightning.engine.commands import fit as fitting
from fl_lightning.engine.commands import replay as replaying
from fl_lightning.engine.fingerprint import code_of_run
from fl_lightning.engine.launching import Result, launch
from fl_lightning.engine.rounds import SimulationBackend
from fl_lightning.engine.run import ClientBackend, Run, VisitRunner
from fl_lightning.engine.run_arguments import RunArguments
from fl_lightning.federation import server as federation
from fl_lightning.federation.client_app import write_app
from fl_lightning.federation.data import SingleSite, Sites
from fl_lightning.federation.serialization import agreement
from fl_lightning.federation.server import FlowerBackend, check_suits
from fl_lightning.federation.site import answer_messages
from fl_lightning.storage.partition_table import save_partition
from fl_lightning.storage.results import FitResult, History
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import Stopped, Terminated, require
from fl_lightning.utilities.lightning_replacements import names_replacements
from fl_lightning.utilities.numerics import deterministic_algorithms

Methods = list[Method] | Method | None


class FederatedTrainer(RunArguments):
    """Trains a LightningModule over the clients of a data module, round by round, on Lightning Fabric.

    Arguments that Lightning's ``Trainer`` also has keep their names and meaning.

    Args:
        max_rounds: number of rounds, at least 0; a callback such as ``EarlyStopping`` may end the run earlier.
        max_seconds: simulated seconds, above 0, with a ``clock``: the run ends before the first round that ends later.
            Schedules over ``self.trainer.max_epochs`` and :class:`.FixBN` count ``max_rounds``.
        local_epochs: passes of a client over its data in a round, at least 1.
        local_steps: local steps of a client in a round, at least 1; replaces ``local_epochs``.
        participation: share of the clients in a round, in (0, 1].
        cohort_size: number of clients in a round; replaces ``participation``.
        sampler: chooses the cohort of each round; None draws it uniformly.
        server_optimizer: optimizer of the pseudo-gradient; None is SGD with lr 1, which is FedAvg. SGD with momentum is
            FedAvgM.
        server_optimizer_scope: entries of the state that the server optimizer updates: the ``parameters``, or
            ``all_float`` entries, including BatchNorm's statistics, as in some reference codes.
        weighting: a client's weight in the mean: its number of training ``examples``, or the same for all
            (``uniform``).
        buffers: ``average`` them by weight (integer ones: the whole part), let the server ``keep`` its own, or keep
            them ``local`` to each client. With ``recalibrate`` the running statistics of BatchNorm are not averaged but
            recomputed for the global model, once a round, on the training data of the clients that sent an update:
            layer by layer, each in a pass over these data. ``recalibrate_once`` averages them and then recomputes all
            in one pass, in which the earlier layers still use the averaged statistics: an approximation. The guide has
            a page on normalisation.
        eval_every_n_rounds: rounds from one evaluation of the global model to the next; the last round is always
            evaluated.
        eval_every_seconds: simulated seconds, above 0, that replace these rounds, with a ``clock``: the first round
            that ends at or after each multiple is evaluated.
        taps: names for submodules whose outputs methods and callbacks read, in addition to the module's own:
            ``{representation: encoder, logits: head}``. If the output is not a tensor, append a colon and a field or an
            index: ``bert:pooler_output``, ``layer:0``. If a submodule is called several times, the tap is its last
            output; in training, the last one with a gradient.
        client_lr_scheduler: scheduler stepped once a round, whose factor multiplies every client's learning rate.
        client_schedulers: treatment of the schedulers that the module returns. They ``continue`` from visit to visit,
            as if the client had trained in every round so far, or they ``restart`` at every visit. A scheduler that
            monitors a metric is stepped once a round, on the round's metrics; with ``restart`` within the visit.
        gradient_clip_val: largest norm, or value, of a local gradient; None does not clip.
        gradient_clip_algorithm: clip the gradients' common ``norm``, or each ``value``; None is ``norm``.
        accumulate_grad_batches: batches of a local step, at least 1; the last step of an epoch may have fewer.
        clients_per_step: most clients of a cohort that train side by side: each of their steps is then one program over
            stacked tensors, which saves most of the time of small models. 1 trains clients sequentially; a larger
            number refuses modules that cannot be mapped over clients. ``auto`` is a rule on model, batch and device:
            small steps are mapped if a trial before round 0 reproduces the results of separate clients. Rounding
            differs between the two ways, and with the clients that share a group. The guide has a page on clients side
            by side.
        accelerator: as in Fabric: auto, cpu, gpu, ... On a Mac with Apple silicon ``auto`` is the CPU, and its GPU,
            which has no float64, is refused.
        devices: as in Fabric: the number of devices, their indices, or ``auto`` or -1 for all. On a CPU this is the
            number of workers, processes that train clients in parallel; ``auto`` uses one for each core that this
            process may use (by its affinity and the quota of its container), and at most one for each client in a
            round. The result is the same, bit for bit, for any number of workers with equal ``threads_per_worker``.
            Under torchrun and SLURM their number of processes replaces this argument. Workers train different clients,
            so a module, its metrics and its libraries see one process, as if ``torch.distributed`` were not
            initialized. On systems that cannot fork processes safely (macOS, Windows), ``auto`` is one worker, and
            several workers run the program again.
        workers_per_device: workers that share a GPU; on a CPU, ``devices`` counts the workers.
        strategy: auto; a strategy that wraps the model would average the gradients of different clients.
        num_nodes: machines that a cluster environment starts this program on.
        precision: as in Fabric: 32-true, bf16-mixed, 16-mixed, ... With ``16-mixed`` each step waits for the GPU, and
            one whose gradients overflow is lost: methods do not see it, and ``steps/lost`` counts it. Visits begin with
            the smallest final gradient scale of the round before. bfloat16 is refused on a GPU that emulates it.
        threads_per_worker: threads of each worker, at least 1. With more than 1, several workers run the program again
            instead of being forked, and rounding differs. None leaves torch's number to a single worker.
        deterministic: as in Lightning: True lets torch use deterministic algorithms, and an operation that has none is
            an error; ``warn`` runs it with a warning. None is True on a GPU, and elsewhere leaves torch's settings as
            they are. The guide on reproducing has a section on GPUs and TF32.
        timeout: seconds, at least 1, that a worker waits for the others before the run ends with an error that names
            them; None sets no limit. A fast worker waits a whole round for the slowest client.
        client_memory: GiB of main memory in which each worker keeps the memory that methods have of clients; the excess
            is stored in the folder of temporary files.
        channels_last: keep images and weights in the channels_last memory format, in which convolutions are faster;
            None defers to the module's attribute ``channels_last``, which is true for an ImageClassifier with
            convolutions; a module without this attribute counts as false.
        checkpoint_every_n_rounds: rounds from one checkpoint to the next; the last round always has one.
        cache_references: run the frozen reference models of MOON and FedCKA on each example once a visit, not once a
            local epoch. The result has the same bits (on a CPU, with one thread), at the cost of memory: for each
            reference model, the compared taps of all examples of a client (0.5 MB an image for ResNet18's first two
            layers at 32 px). True needs training batches without augmentation. ``auto`` does so if it provably changes
            no bit and saves work: on a CPU with ``threads_per_worker`` 1; for a model whose classes, down to each
            submodule, belong to torch or this package, without transfer hooks; for clients whose loader declares itself
            deterministic, in visits of more than one epoch; and while the taps take at most ``client_memory`` and at
            most a quarter of the available memory at the start of the run, divided among the workers of the machine.
            This memory is known on Linux only.
        compile: run the module's ``forward`` through ``torch.compile`` in training: True, or one of its modes, such as
            ``reduce-overhead``, which uses CUDA graphs on a GPU. Clients then train sequentially. Batches smaller than
            the usual one run uncompiled, as does a module that cannot be compiled, after a warning. Rounding differs
            from uncompiled runs.
        callbacks: observers of the run.
        logger: True writes TensorBoard events into the run's folder, False nothing; or loggers of Fabric or Lightning.
        default_root_dir: folder of all runs; None is ``runs``.
        name: folder of this run's versions; None names it after the methods.
        on_client_error: reaction to a failing client: ``raise`` its error, or ``skip`` the client and warn.
        min_clients: fewest clients of a cohort that must succeed under ``on_client_error=skip``; 0 goes on if all fail.
        systems: simulates clients that drop out, stragglers, and clients that are sometimes absent, as in the papers of
            FedProx and FedNova; None lets all clients do all of their work.
        clock: simulated seconds of the clients' visits, so that methods can be compared by time; None has no clock.
        asynchronous: a server that does not wait for its clients: a round is a step of the server, which takes the next
            updates that arrive by the ``clock``, each from a client that began with the state of its time. The
            guide has a page on asynchronous federation. None waits for the cohort of each round.
        fast_dev_run: True (or a number n) runs 1 (n) rounds of 1 (n) batches and writes nothing.
        enable_progress_bar: report progress on stderr: a line for each evaluation, a table at the end, and on a
            terminal a bar over the rounds and, in long ones, over the local steps.

    Attributes:
        callbacks: observers of the run.
        should_stop: set this to True, on any worker, to end the run after the current round.
        arguments: the arguments that are plain values, for loggers.
        config: the resolved config of a command; None for a trainer that was not built from one.
        weights: file from which the weights of the last command's model were loaded; None without one.

    Raises:
        UsageError: an argument is out of its range.
    """

    # the methods below that are commands of the command line
    commands = ("fit", "validate", "test", "predict", "partition", "replay", "doctor", "federate", "site")

    @names_replacements
    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        method: Methods = None,
        ckpt_path: str | Path | None = None,
        weights: str | Path | None = None,
        allow_changes: bool = False,
    ) -> FitResult:
        """Train a model over the clients of a data module; ``model`` then holds the trained global model.

        Later evaluations by ``validate``, ``test`` and ``predict`` do not change ``run_dir``, ``history`` and
        ``metrics``.

        Args:
            model: the model.
            datamodule: the clients' data: a federated data set, or ``Partitioned`` around any LightningDataModule.
            method: the methods of the run; without one it is FedAvg.
            ckpt_path: checkpoint to resume from, in its own folder and to the same bits: a path, or ``last`` for the
                newest version of this run, which begins with round 0 if it has no checkpoint yet. A damaged checkpoint
                is reported and replaced by the previous one. A restart by torchrun resumes from the last checkpoint
                automatically.
            weights: weights to begin with: another run's ``last.ckpt`` or ``model.ckpt``, a checkpoint of Lightning, or
                a file of a state dict (``.pt``, ``.pth``, ``.safetensors``). Other contents of the file are ignored.
            allow_changes: resume from ``ckpt_path`` even if the run differs from the one that wrote it, such as in its
                methods or a learning rate. It then continues in a new version, whose ``changes.yaml`` lists the
                changes.

        Returns:
            The history of the run, its last metrics and its folder, which a notebook shows as a table and curves.
            :func:`fl_lightning.load_run` reads the same from the folder, also of a stopped run.

        Raises:
            UsageError: arguments are invalid or incompatible; raised before round 0, with nothing written.
            ClientError: a client failed in a round.
            KeyboardInterrupt: SIGINT stopped the run.
            SystemExit: SIGTERM, or SLURM's SIGUSR1, stopped the run.
        """
        hint = f"a resumed run loads its weights from ckpt_path={str(ckpt_path)!r}; pass only one of them"
        require(weights is None or ckpt_path is None, "weights", str(weights), hint)
        self.should_stop = self.save_best = False
        if "PL_GLOBAL_SEED" not in os.environ:  # otherwise Lightning has reported it
            advice = "call lightning.seed_everything before you build the model, which draws its first weights"
            rank_zero_info(f"no seed was set; using {base_seed()}; {advice}")
        how = {"ckpt_path": ckpt_path, "allow_changes": allow_changes}
        try:
            self._launch(fitting.fit, model, datamodule, method, "fit", weights, **how)
        except Stopped as stopped:
            stopped.weights = weights is not None
            if self.config is None and isinstance(stopped, Terminated):  # Python prints nothing for it
                rank_zero_only(print)(stopped, file=sys.stderr)
            raise
        folder = self.run_dir
        name = "+".join(self.methods.names) or "fedavg" if folder is None else "/".join(folder.parts[-2:])
        return FitResult(name, History(self.history), folder, self.seed)

    @names_replacements
    def validate(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        method: Methods = None,
        weights: str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate a model on the validation data of a data module; return its metrics and the metrics of callbacks.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run or of Lightning, whose (global) model is loaded first: a path, or ``last``
                for the newest version of this run.
            method: the methods of the run, which name its folder if ``ckpt_path`` is ``last``, and whose logits a
                callback may request.
            weights: the weights that the run began with, as in fit; loaded if ``ckpt_path`` is None.
        """
        how = {"phase": "val", "ckpt_path": ckpt_path}
        return self._launch(evaluating.evaluate_and_observe, model, datamodule, method, "validate", weights, **how)

    @names_replacements
    def test(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        method: Methods = None,
        weights: str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate a model on the test data of a data module; return its metrics and the metrics of callbacks.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run or of Lightning, whose (global) model is loaded first: a path, or ``last``
                for the newest version of this run.
            method: the methods of the run, which name its folder if ``ckpt_path`` is ``last``, and whose logits a
                callback may request.
            weights: the weights that the run began with, as in fit; loaded if ``ckpt_path`` is None.
        """
        how = {"phase": "test", "ckpt_path": ckpt_path}
        return self._launch(evaluating.evaluate_and_observe, model, datamodule, method, "test", weights, **how)

    @names_replacements
    def predict(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        method: Methods = None,
        weights: str | Path | None = None,
        output: str | Path | None = None,
    ) -> list[Any]:
        """Run a model's ``predict_step`` on the ``predict_dataloader`` of a data module, or else on its test data.

        Returns:
            The outputs of ``predict_step`` by batch, in order; with several loaders, a list for each of them.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run or of Lightning, whose (global) model is loaded first: a path, or ``last``
                for the newest version of this run.
            method: the methods of the run, which name its folder if ``ckpt_path`` is ``last``.
            weights: the weights that the run began with, as in fit; loaded if ``ckpt_path`` is None.
            output: file to which the outputs are written, as a list for ``torch.load``; None writes none, but on the
                command line means ``predictions.pt`` in the run's folder, or next to another checkpoint.
        """
        how = {"ckpt_path": ckpt_path, "output": None if output is None else Path(output)}
        return self._launch(evaluating.predict_once, model, datamodule, method, "predict", weights, **how)

    def partition(self, datamodule: LightningDataModule) -> Path:
        """Partition the data over the clients and print the partition, without training; return the written folder.

        The folder holds ``plan.npz`` and ``clients.csv``. Its subfolder ``figures`` has two figures: the number of
        samples of each client and class, and the distribution of each client's mean pixels, before augmentation.

        Args:
            datamodule: the data.
        """
        validation.check_data(datamodule)
        validation.check_folder("trainer.default_root_dir", self.default_root_dir)
        datamodule.prepare_data()
        datamodule.setup("fit")
        folder = Path(CSVLogger(self.default_root_dir, "partition").log_dir)
        print(save_partition(datamodule, folder))
        return folder

    def replay(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        round: int,
        client: int,
        ckpt_path: str | Path | None = None,
        method: Methods = None,
        weights: str | Path | None = None,
        allow_changes: bool = False,
    ) -> dict[str, float]:
        """Repeat the visit of one client in this process, with the same bits as in the run; return its logged values.

        No files are written. Afterwards ``model`` has the client's weights. A visit that failed in the run fails again.

        Args:
            model: the model.
            datamodule: the clients' data.
            round: the round of the visit, from 0.
            client: id of the client.
            ckpt_path: ``RUN/failures/round-R-client-K.pt``, the record of a failed client; or a checkpoint after
                exactly ``round`` rounds, for any client of that round; or ``last`` for the newest version of this run.
            method: the methods of the run.
            weights: the weights that the run began with, which the file already contains.
            allow_changes: repeat the visit even if this run differs from the one that wrote the file.

        Raises:
            ClientError: the visit failed, with the message of the run.
            UsageError: the file lacks this visit, or belongs to another run.
        """
        how = {"ckpt_path": ckpt_path, "round_": round, "client": client, "allow_changes": allow_changes}
        with patched(self, devices=1, num_nodes=1, workers_per_device=1):
            return self._launch(replaying.replay, model, datamodule, method, "fit", weights, **how)

    def doctor(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        method: Methods = None,
        ckpt_path: str | Path | None = None,
        weights: str | Path | None = None,
        allow_changes: bool = False,
    ) -> dict[str, Any]:
        """Resolve, check and estimate a fit without running it; raise the errors of ``fit`` before round 0.

        One visit of a few batches is measured on copies of the model and the methods. Nothing is written, and no state
        is changed.

        Args:
            model: the model.
            datamodule: the clients' data.
            method: the methods of the run.
            ckpt_path: the checkpoint that ``fit`` would resume from.
            weights: the weights that ``fit`` would begin with.
            allow_changes: whether ``fit`` would resume from ``ckpt_path`` with a run that differs.

        Returns:
            The plan of the run in plain values, by section; ``warnings`` lists the warnings of a fit.

        Raises:
            UsageError: arguments are invalid or incompatible.
            ClientError: the measured client failed.
        """
        attributes = {"_run": self._run, "fabric": self.fabric, "weights": self.weights}
        with patched(self, **attributes), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            copied = examination.copies(model, as_list(method))
            how = {"ckpt_path": ckpt_path, "allow_changes": allow_changes}
            plan = self._launch(examination.diagnose, copied[0], datamodule, copied[1], "fit", weights, **how)
        texts = dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught)
        return {**plan, "warnings": list(texts)}

    def federate(
        self,
        model: LightningModule,
        output: str | Path,
        datamodule: LightningDataModule | None = None,
        method: Methods = None,
        sites: list[str] | None = None,
    ) -> Path:
        """Write the run as an app for Flower, in which each client is a separate site; return its folder.

        The folder also holds the files of each site: the config, and a template with its own settings.

        Args:
            model: the model.
            output: the folder, which is created.
            datamodule: the clients' data, whose config is copied into the templates; no data are read. None leaves the
                data to each site.
            method: the methods of the run.
            sites: names of the sites, in the order of the clients; None generates a name for each client.

        Raises:
            UsageError: the run cannot run at sites.
        """
        require(self.config is not None, "federate", None, "use the command line, with a --config")
        with patched(self, devices=1, num_nodes=1):
            check_suits(self)
        require(bool(sites) or datamodule is not None, "sites", sites, "pass the names of the sites, or data")
        names = sites or [f"site-{k}" for k in range(getattr(datamodule, "num_clients", 1))]
        Sites(names)  # refuses invalid names
        path = Path(output)
        validation.check_folder("output", path)
        write_app(path, self.config or {}, names)
        return path

    def site(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        name: str,
        method: Methods = None,
        part: int | None = None,
        folder: str | Path = "site",
        socket: str | Path | None = None,
        largest: float = 1e9,
        most_bytes: int = 2**32,
    ) -> None:
        """Run the worker of a site: the only process there that reads its data, and that trains its client.

        The worker prints the data that leave the site, then answers the messages that Flower's ClientApp relays to its
        socket, until it is ended. The memory of its client is stored in ``folder``, so that it may be restarted.

        Args:
            model: the model.
            datamodule: the data of the site, with one client.
            name: name of the site in the server's config.
            method: the methods of the run.
            part: the client that the site represents, if ``datamodule`` has several.
            folder: folder for the client's memory.
            socket: path of the socket; None is ``worker.sock`` in ``folder``.
            largest: the largest number that a state from the server may hold.
            most_bytes: the largest accepted message.

        Raises:
            UsageError: arguments are invalid or incompatible.
        """
        require(self.config is not None, "site", name, "use the command line, with a --config")
        path = Path(folder)
        validation.check_folder("folder", path)
        how = {"name": name, "folder": path, "socket": Path(socket or path / "worker.sock")}
        how |= {"agreed": agreement(self.config or {}, model, as_list(method)), "largest": largest, "limit": most_bytes}
        # a site leaves these to the server
        arguments = {"callbacks": [], "logger": False, "devices": 1, "num_nodes": 1, "workers_per_device": 1}
        arguments |= {"clients_per_step": 1, "participation": 1.0, "cohort_size": None, "sampler": UniformSampler()}
        print(f"site {name}: reading data", flush=True)  # may take minutes
        with patched(self, **arguments, min_clients=1, on_client_error="raise"):
            self._launch(answer_messages, model, SingleSite(datamodule, part), method, "fit", None, **how)

    def _launch(
        self,
        command: Callable[..., Result],
        model: LightningModule,
        datamodule: Any,
        method: Methods,
        stage: str,
        weights: str | Path | None,
        **how: Any,
    ) -> Result:
        self.weights = None if weights is None else Path(weights)

        def work(run: Run) -> Result:
            # in each worker, so that the worker's copies of callbacks find the parts of the run
            self._run, self.fabric = run, run.fabric
            if command is fitting.fit:
                self._fitted = run
            run.call("setup")
            return command(run, weights=self.weights, **how)

        backend: ClientBackend = SimulationBackend()
        if stage == "fit" and isinstance(datamodule, Sites):
            check_suits(self)
            agreed = agreement(self.config or {}, model, as_list(method))
            rules = (self.warn, self.on_client_error, self.min_clients)
            backend = FlowerBackend(datamodule, federation.link, agreed, *rules)
            backend.join()
        methods = MethodList(as_list(method))
        validation.check_module(model, stage)
        validation.check_data(datamodule)
        if stage == "fit" and not self.fast_dev_run:
            validation.check_folder("trainer.default_root_dir", self.default_root_dir)
        code_of_run(self, model, datamodule, methods.methods)  # read now: a file may be edited while data are prepared
        try:
            with deterministic_algorithms(self.deterministic):
                runner = runner_for(self.clients_per_step)
                return launch(self, model, datamodule, methods, work, backend, runner, stage)
        finally:
            if self._fitted is not None:  # the trainer describes its fit, not a later evaluation
                self._run, self.fabric = self._fitted, self._fitted.fabric


def runner_for(clients_per_step: int | str) -> VisitRunner:
    """Return how the clients train; only this function knows of ``fl_lightning.vectorized``, which is optional."""
    if clients_per_step == 1:
        return VisitRunner()
    try:
        from fl_lightning.vectorized.runner import VectorizedRunner
    except ImportError as error:
        hint = f"clients cannot train side by side here ({error}); pass 1 or auto"
        require(clients_per_step == "auto", "trainer.clients_per_step", clients_per_step, hint)
        return VisitRunner(str(error))
    return VectorizedRunner()
