"""The trainer: the arguments of a run, and its commands."""

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

from fl_lightning.code_fingerprint import code_of
from fl_lightning.engine import validation
from fl_lightning.engine.arguments import RunArguments
from fl_lightning.engine.commands import doctor as examination
from fl_lightning.engine.commands import fit as commands
from fl_lightning.engine.commands import replay as replaying
from fl_lightning.engine.fingerprint import modules_of
from fl_lightning.engine.replaced import replaced
from fl_lightning.engine.rounds import ClientsOnWorkers
from fl_lightning.engine.run import Clients, Result, Run, launch
from fl_lightning.errors import Stopped, Terminated, require
from fl_lightning.federation import server as federation
from fl_lightning.federation.app import write_app
from fl_lightning.federation.data import OneSite, Sites
from fl_lightning.federation.messages import agreed_part
from fl_lightning.federation.server import ClientsAtSites, check_suits
from fl_lightning.federation.site import Site, answer_messages
from fl_lightning.method import Method, MethodList
from fl_lightning.records.partition import save_partition
from fl_lightning.results import FitResult, History
from fl_lightning.sampling import UniformSampler
from fl_lightning.seeding import base_seed

Methods = list[Method] | Method | None


class FederatedTrainer(RunArguments):
    """Trains a LightningModule over the clients of a data module, round by round, on Lightning Fabric.

    Arguments which Lightning's ``Trainer`` has keep their names and meaning.

    Args:
        max_rounds: rounds to train, at least 0; a callback such as ``EarlyStopping`` may end the run earlier.
        local_epochs: passes over its data that a client makes in a round, at least 1.
        local_steps: local steps a client makes in a round, at least 1; takes the place of ``local_epochs``.
        participation: share of the clients in a round, in (0, 1].
        cohort_size: number of clients in a round; takes the place of ``participation``.
        sampler: chooses the cohort of each round; None draws it uniformly.
        server_optimizer: optimizer of the pseudo-gradient; None is SGD with lr 1, which is FedAvg. SGD with momentum is
            FedAvgM.
        server_optimizer_scope: what the server optimizer moves: the ``parameters``, or ``all_float`` entries of the
            state, BatchNorm's statistics among them, as some reference codes do.
        weighting: a client's weight in the mean: its number of training ``examples``, or the same for all
            (``uniform``).
        buffers: ``average`` them by weight (integer ones: the whole part), let the server ``keep`` its own, or keep
            them ``local`` to each client. With ``recalibrate`` the running statistics of BatchNorm are not averaged but
            recomputed for the global model, once a round, on the training data of the clients that sent an update:
            layer by layer, each in a pass over these data. ``recalibrate_once`` averages them and then recomputes all
            in one pass, in which each layer sees what the averaged statistics of the earlier ones give: an
            approximation. The guide has a page on normalisation.
        eval_every_n_rounds: rounds from one evaluation of the global model to the next; the last round is always
            evaluated.
        taps: names for submodules whose outputs methods and callbacks read, beside those the module declares:
            ``{representation: encoder, logits: head}``. Of an output that is no tensor a colon and a field or an index
            follow: ``bert:pooler_output``, ``layer:0``. Of a submodule called several times, it is the last output;
            in training, the last one with a gradient.
        client_lr_scheduler: scheduler stepped once a round, whose factor multiplies every client's learning rate.
        client_schedulers: what becomes of the schedulers that the module itself returns. They ``continue``, since a
            visit is a part of one fit, where they would be if the client had trained in every round so far; or they
            ``restart`` at every visit. One that watches a metric is stepped once a round, on the round's metrics; with
            ``restart`` within the visit.
        gradient_clip_val: largest norm, or value, of a local gradient; None does not clip.
        gradient_clip_algorithm: clip the gradients' common ``norm``, or each ``value``; None is ``norm``.
        accumulate_grad_batches: batches of a local step, at least 1; the last step of an epoch may have fewer.
        clients_per_step: how many clients of a cohort train side by side, at most: each of their steps is then one
            program over stacked tensors, which saves most of the time of small models. 1 trains one client after the
            other; a number refuses what cannot be mapped over clients. ``auto`` is a rule on model, batch and device:
            small steps are mapped where a trial before round 0 gives what each client gives alone. Rounding differs
            between the two ways, and by who shares a group. The guide has a page on clients side by side.
        accelerator: as in Fabric: auto, cpu, gpu, ... On a Mac with Apple silicon ``auto`` is the CPU, and its GPU,
            which has no float64, is refused.
        devices: as in Fabric: how many, or which. On a CPU this is the number of workers, processes that train clients
            side by side; ``auto`` takes one for each core, and no more than there are clients in a round. The result is
            the same, bit for bit, for any number of workers of equal ``threads_per_worker``. Under torchrun and SLURM
            the number of processes they start replaces this argument. Workers train different clients, so a module, its
            metrics and its libraries see one process, as if ``torch.distributed`` were not initialized. Where processes
            cannot be forked (macOS, Windows), ``auto`` is one worker, and several run the program anew.
        workers_per_device: workers that share a GPU; on a CPU, workers are counted by ``devices``.
        strategy: auto; a strategy that wraps the model would average the gradients of different clients.
        num_nodes: machines that a cluster environment starts this program on.
        precision: as in Fabric: 32-true, bf16-mixed, 16-mixed, ... With ``16-mixed`` a step whose gradients overflow is
            lost: methods do not see it, and ``steps/lost`` counts it. Visits begin with the smallest gradient scale
            that those of the round before have ended with. bfloat16 is refused on a GPU that emulates it.
        threads_per_worker: threads of each worker, at least 1; None is 1 where there are several workers, else torch's
            choice. With more than 1 thread, several workers run the program anew instead of being forked.
        timeout: seconds, at least 1, that a worker waits for the others before the run ends with an error that names
            them; None waits as long as it takes. A fast worker waits a whole round for the slowest client.
        client_memory: GiB of main memory in which each worker keeps what methods remember of clients; what exceeds it
            is kept in the folder of temporary files.
        channels_last: keep images and weights in the channels_last memory format, in which convolutions are faster;
            None defers to the module's attribute ``channels_last``, which is true for an ImageClassifier with
            convolutions; a module without this attribute counts as false.
        checkpoint_every_n_rounds: rounds from one checkpoint to the next; the last round always has one.
        cache_references: run the frozen reference models of MOON and FedCKA on each example once a visit, not once a
            local epoch. The result has the same bits (on a CPU, with one thread), at the cost of memory: for each
            reference model, the compared taps of all examples of a client (0.5 MB an image for ResNet18's first two
            layers at 32 px). True needs training batches without augmentation. ``auto`` does it where it is known to
            change no bit and saves work: with ``threads_per_worker`` 1 on a CPU; for a model whose classes, down to
            each submodule, are torch's and this package's, without transfer hooks; for clients whose loader says that
            it is deterministic, in visits of more than one epoch; and as far as the taps take at most ``client_memory``
            and at most a quarter of the memory that is available on the device when the run begins, divided among its
            workers. On a CPU this memory is known on Linux only.
        compile: run the module's ``forward`` through ``torch.compile`` in training: True, or one of its modes, such as
            ``reduce-overhead``, which uses CUDA graphs on a GPU. Clients then train one by one. Batches smaller than
            the usual one run uncompiled, and so does a module that cannot be compiled, after a warning. Rounding
            differs from uncompiled runs.
        callbacks: observers of the run.
        logger: True writes TensorBoard events into the run's folder, False nothing; or loggers of Fabric or Lightning.
        default_root_dir: folder of all runs; None is ``runs``.
        name: folder of this run's versions; None names it after the methods.
        on_client_error: what to do when a client fails: ``raise``, or ``skip`` it and warn.
        min_clients: fewest clients of a cohort that must succeed under ``on_client_error=skip``.
        systems: clients that drop out, stragglers, and clients that are not always there, as FedProx's and FedNova's
            papers simulate them; None has all clients do all of their work.
        fast_dev_run: True (or a number n) runs 1 (n) rounds of 1 (n) batches and writes nothing.
        enable_progress_bar: say on stderr how the run gets on: a line for each evaluation, a table at the end, and on a
            terminal a bar over the rounds and, in long ones, over the local steps.

    Attributes:
        callbacks: observers of the run.
        should_stop: set it to True, on any worker, and the run ends after the present round.
        arguments: the arguments that are plain values, for loggers.
        config: the resolved config of a command, None where the trainer was not built from one.
        weights: file that the weights of the last command's model came from; None without one.

    Raises:
        UsageError: an argument out of its range.
    """

    # the methods below that are commands of the command line
    commands = ("fit", "validate", "test", "predict", "partition", "replay", "doctor", "federate", "site")

    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        method: Methods = None,
        ckpt_path: str | Path | None = None,
        weights: str | Path | None = None,
        allow_changes: bool = False,
    ) -> FitResult:
        """Train a model over the clients of a data module, and leave the trained global model in ``model``.

        The evaluations after it, ``validate``, ``test`` and ``predict``, leave ``run_dir``, ``history`` and ``metrics``
        as they are.

        Args:
            model: the model.
            datamodule: the clients' data: a federated data set, or ``Partitioned`` around any LightningDataModule.
            method: the methods of the run; none is FedAvg.
            ckpt_path: checkpoint to resume from, in its own folder and to the same bits: a path, or ``last`` for that
                of the newest version of this run, which begins with round 0 where it has none yet. One that is
                damaged is named, and the one before it is taken. A restart by torchrun resumes from the last one
                without being told.
            weights: weights to begin with: another run's ``last.ckpt`` or ``model.ckpt``, a checkpoint of Lightning, or
                a file of a state dict (``.pt``, ``.pth``, ``.safetensors``). They are all that is taken of the file.
            allow_changes: go on from ``ckpt_path`` although the run differs from the one that wrote it, such as in its
                methods or a learning rate. It then goes on in a new version, whose ``changes.yaml`` lists the changes.

        Returns:
            The history of the run, its last metrics and its folder, which a notebook shows as a table and curves.
            :func:`fl_lightning.load_run` reads the same from the folder, also of a run that was stopped.

        Raises:
            UsageError: something does not fit together; raised before round 0, with nothing written.
            ClientError: a client failed in a round.
            KeyboardInterrupt: SIGINT stopped the run.
            SystemExit: SIGTERM, or SLURM's SIGUSR1, stopped the run.
        """
        hint = f"a run that resumes has its weights in ckpt_path={str(ckpt_path)!r}; give one of the two"
        require(weights is None or ckpt_path is None, "weights", str(weights), hint)
        self.should_stop = self.keep_as_best = False
        if "PL_GLOBAL_SEED" not in os.environ:  # else Lightning has said it
            advice = "call lightning.seed_everything before the model is built, whose first weights are drawn then"
            rank_zero_info(f"seed {base_seed()}, since none was set; {advice}")
        how = {"ckpt_path": ckpt_path, "allow_changes": allow_changes}
        try:
            self._launch(commands.fit, model, datamodule, method, "fit", weights, **how)
        except Stopped as stopped:
            stopped.weights = weights is not None
            if self.config is None and isinstance(stopped, Terminated):  # which Python itself ends without a word
                rank_zero_only(print)(stopped, file=sys.stderr)
            raise
        folder = self.run_dir
        name = "+".join(self.methods.names) or "fedavg" if folder is None else "/".join(folder.parts[-2:])
        return FitResult(name, History(self.history), folder, self.seed)

    def validate(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        method: Methods = None,
        weights: str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate a model on the validation data of a data module, and return its metrics and those of callbacks.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run or of Lightning, whose (global) model is loaded first: a path, or ``last``
                for that of the newest version of this run.
            method: the methods of the run, which name its folder where ``ckpt_path`` is ``last``, and whose logits a
                callback may ask for.
            weights: the weights that the run began with, as in fit; they are loaded where there is no ``ckpt_path``.
        """
        how = {"phase": "val", "ckpt_path": ckpt_path}
        return self._launch(commands.evaluate_and_observe, model, datamodule, method, "validate", weights, **how)

    def test(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        method: Methods = None,
        weights: str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate a model on the test data of a data module, and return its metrics and those of callbacks.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run or of Lightning, whose (global) model is loaded first: a path, or ``last``
                for that of the newest version of this run.
            method: the methods of the run, which name its folder where ``ckpt_path`` is ``last``, and whose logits a
                callback may ask for.
            weights: the weights that the run began with, as in fit; they are loaded where there is no ``ckpt_path``.
        """
        how = {"phase": "test", "ckpt_path": ckpt_path}
        return self._launch(commands.evaluate_and_observe, model, datamodule, method, "test", weights, **how)

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
            What ``predict_step`` returns for each batch, in order; where there are several loaders, a list of each.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run or of Lightning, whose (global) model is loaded first: a path, or ``last``
                for that of the newest version of this run.
            method: the methods of the run, which name its folder where ``ckpt_path`` is ``last``.
            weights: the weights that the run began with, as in fit; they are loaded where there is no ``ckpt_path``.
            output: file to which the outputs are written, as a list for ``torch.load``; None writes none, but on the
                command line means ``predictions.pt`` in the run's folder, or beside another checkpoint.
        """
        how = {"ckpt_path": ckpt_path, "output": None if output is None else Path(output)}
        return self._launch(commands.predict_once, model, datamodule, method, "predict", weights, **how)

    def partition(self, datamodule: LightningDataModule) -> Path:
        """Deal the data out to the clients and print who holds what, without training; returns the folder it writes.

        The folder holds ``plan.npz``, ``clients.csv``, and in ``figures`` the samples of each client and class and the
        distribution of the mean pixel of each client's images, as they are stored, before augmentation.

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
        """Repeat the visit of one client in this process, to the bits of the run, and return what it logged.

        Nothing is written. ``model`` is left with the client's model; a visit that failed in the run fails here, too.

        Args:
            model: the model.
            datamodule: the clients' data.
            round: the round of the visit, from 0.
            client: id of the client.
            ckpt_path: ``RUN/failures/round-R-client-K.pt``, which a client that fails leaves behind; or a checkpoint
                with as many rounds done as ``round`` says, for any client of that round; or ``last`` for that of the
                newest version of this run.
            method: the methods of the run.
            weights: the weights that the run began with, which are in the file already.
            allow_changes: repeat the visit although this run differs from the one that wrote the file.

        Raises:
            ClientError: the visit failed, with the message of the run.
            UsageError: the file has no such visit, or is of another run.
        """
        how = {"ckpt_path": ckpt_path, "round_": round, "client": client, "allow_changes": allow_changes}
        with replaced(self, devices=1, num_nodes=1, workers_per_device=1):
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
        """Resolve, check and estimate a fit without running it; it refuses what ``fit`` refuses.

        One visit of a few batches is measured on copies of the model and the methods. Nothing is written, and no state
        is changed.

        Args:
            model: the model.
            datamodule: the clients' data.
            method: the methods of the run.
            ckpt_path: the checkpoint that ``fit`` would resume from.
            weights: the weights that ``fit`` would begin with.
            allow_changes: whether ``fit`` would go on from ``ckpt_path`` with a run that differs.

        Returns:
            The plan of the run in plain values, by section; its ``warnings`` are those of a fit.

        Raises:
            UsageError: something does not fit together.
            ClientError: the client that is measured failed.
        """
        here = {"_run": self._run, "fabric": self.fabric, "weights": self.weights}
        with replaced(self, **here), warnings.catch_warnings(record=True) as caught:
            copied = examination.copies(model, validation.as_list(method))
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
        """Write the run as an app for Flower, in which each client is a site of its own; returns its folder.

        The folder also holds what a site needs: the config, and a file of its own to be filled in.

        Args:
            model: the model.
            output: the folder, which is made.
            datamodule: the clients' data, which stay where they are; the files of the sites begin with them. None
                leaves them to each site.
            method: the methods of the run.
            sites: names of the sites, in the order of the clients; None names as many as there are clients.

        Raises:
            UsageError: the run cannot be carried out at sites.
        """
        require(self.config is not None, "federate", None, "call it on the command line, with a --config")
        with replaced(self, devices=1, num_nodes=1):
            check_suits(self)
        require(bool(sites) or datamodule is not None, "sites", sites, "give the names of the sites, or data")
        names = sites or [f"site-{k}" for k in range(getattr(datamodule, "num_clients", 1))]
        Sites(names)  # refuses bad ones
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
        """Be the worker of a site: the one process there that reads its data, and trains its client when asked to.

        It says what leaves the site, listens on a socket for the messages that Flower's ClientApp passes on, and
        works until it is ended. What its client remembers lies in ``folder``, so that it may be started again.

        Args:
            model: the model.
            datamodule: the data of the site, those of one client.
            name: name of the site, as the server has it.
            method: the methods of the run.
            part: the client that the site stands for, where ``datamodule`` deals out its data to several.
            folder: what the client remembers lies here.
            socket: the socket; None is ``worker.sock`` in ``folder``.
            largest: the largest number that a state from the server may hold.
            most_bytes: the largest message that is taken.

        Raises:
            UsageError: something does not fit together.
        """
        require(self.config is not None, "site", name, "call it on the command line, with a --config")
        path, methods = Path(folder), validation.as_list(method)
        validation.check_folder("folder", path)
        agreed = self._agreed(model, methods)

        def work(run: Run) -> None:
            self._run, self.fabric = run, run.fabric
            site = Site(run, name, agreed, path, largest, most_bytes)
            answer_messages(site, Path(socket or path / "worker.sock"))

        # what only the server does, and what other machines do
        alone = {"callbacks": [], "logger": False, "devices": 1, "num_nodes": 1, "workers_per_device": 1}
        alone |= {"clients_per_step": 1, "participation": 1.0, "cohort_size": None, "sampler": UniformSampler()}
        print(f"site {name}: reading data", flush=True)  # which may take minutes
        with replaced(self, **alone, min_clients=1, on_client_error="raise"):
            data = OneSite(datamodule, part)
            launch(self, model, data, MethodList(methods), work, ClientsOnWorkers(), "fit")

    def _agreed(self, model: LightningModule, methods: list[Method]) -> dict[str, Any]:
        """What the server and the sites of a run must have the same."""
        return {**agreed_part(self.config or {}), "code": code_of(modules_of([model, methods]))}

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
            # in each worker, so that its copy of the callbacks finds its parts of the run
            self._run, self.fabric = run, run.fabric
            if command is commands.fit:
                self._fitted = run
            run.call("setup")
            return command(run, weights=self.weights, **how)

        clients: Clients = ClientsOnWorkers()
        methods = validation.as_list(method)
        if stage == "fit" and isinstance(datamodule, Sites):
            check_suits(self)
            rules = (self.warn, self.on_client_error, self.min_clients)
            clients = ClientsAtSites(datamodule, federation.link, self._agreed(model, methods), *rules)
            clients.join()
        try:
            return launch(self, model, datamodule, MethodList(methods), work, clients, stage)
        finally:
            if self._fitted is not None:  # the trainer describes its fit, not an evaluation after it
                self._run, self.fabric = self._fitted, self._fitted.fabric
