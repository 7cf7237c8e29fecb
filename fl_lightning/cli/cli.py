"""The command line: LightningCLI with a federated trainer and a list of methods."""

from __future__ import annotations

import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, DefaultHelpFormatter, Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fl_lightning import callbacks, data, methods, models, optim  # noqa: F401, for their short names in a config
from fl_lightning.callbacks import Callback
from fl_lightning.cli.config_checks import building, causes_of, check_resolved
from fl_lightning.cli.config_files import config_and_entries, pairs_of
from fl_lightning.cli.entry_point import find_own_classes, print_usage_error, program
from fl_lightning.cli.parser_errors import LISTS, shorten
from fl_lightning.cli.parser_loading import CHECKED, ValueTextError
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.method import MethodList
from fl_lightning.engine.argument_checks import as_list
from fl_lightning.engine.commands.doctor import as_text
from fl_lightning.engine.launching import folder_of_versions
from fl_lightning.storage.atomic_io import write_atomically
from fl_lightning.storage.checkpoint import find_checkpoint, in_place
from fl_lightning.storage.metric_format import final_names, format_value
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import (
    ClientError,
    Stopped,
    UsageError,
    add_note,
    count,
    is_user_code,
    require,
    with_location,
)
from fl_lightning.utilities.lightning_compat import LightningDataModule, LightningModule
from fl_lightning.utilities.yaml_files import read_yaml

# classes of a key that its help lists in full
MOST_CLASSES = 100


class ConfigFile(ActionConfigFile):
    """Reads a config, a file or one that the package carries; its lists replace the lists of earlier files.

    The parser would merge two lists of the same length item by item, and MOON in place of FedProx would get its mu.
    """

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: Any = None) -> None:
        values, entries = config_and_entries(values)
        forget_lists(cfg, entries)
        super().__call__(parser, cfg, values, option_string)


def forget_lists(before: Any, entries: Any) -> None:
    """Empty the lists of classes of a config that new entries replace."""
    for key, value in entries.items() if isinstance(entries, Mapping) else ():
        earlier = before.get(key)
        if isinstance(value, list) and isinstance(earlier, list):
            before[key] = []
        elif isinstance(earlier, (Namespace, dict)):
            forget_lists(earlier, value)


def values_of(words: Any, option: str) -> list[str]:
    """The values that a command line gives to an option, as ``--key value`` or ``--key=value``."""
    pairs = pairs_of(words) if isinstance(words, list) else ()
    return [value for name, value in pairs if name == option]


class HelpFormatter(DefaultHelpFormatter):
    """Lists the classes of this package alone where a key takes very many, as each layer of torch is a Module."""

    def _expand_help(self, action: Any) -> str:
        def shortened(match: re.Match[str]) -> str:
            names = match[1].split(", ")
            of_package = [name for name in names if re.fullmatch(r"fl_lightning\.\w+\.\w+", name)]
            return match[0] if len(names) <= MOST_CLASSES else f"classes of this package: {', '.join(of_package)}"

        return re.sub(r"known subclasses: ([\w., ]+)", shortened, super()._expand_help(action) or "")


class Parser(LightningArgumentParser):
    """A parser whose errors are one line instead of the whole usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"parser_mode": CHECKED, "formatter_class": HelpFormatter, **kwargs})

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = ConfigFile
        return super().add_argument(*args, **kwargs)

    def parse_args(self, args: Any = None, *positional: Any, **how: Any) -> Any:
        if not self.exit_on_error and args is not None:
            # an outer parser passes the value for an argument of a class on as Python writes it
            none = re.compile(r"(^--[\w.]+=(?=None$)|[\[ ](?=None[,\]}]))None")
            args = [none.sub(r"\1null", word) for word in args]
        return super().parse_args(args, *positional, **how)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        # nested parsers raise instead of exiting, and add the key's path on the way up
        if not self.exit_on_error:
            return super().error(message, ex)
        usage = usage_error(ex) if ex is not None else None
        if isinstance(usage, ValueTextError):
            key = ".".join(re.findall(r'Parser key "([^"]+)"', str(message)))
            raise UsageError(f"{key or 'config'}: {usage}")
        raise usage or UsageError(shorten(str(message)))


class _SaveConfig(Callback):
    """Saves the resolved config into the run's folder."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        self.parser, self.config = parser, config

    def on_fit_start(self, trainer: RunContext) -> None:
        if trainer.run_dir is None:
            return
        path, config = trainer.run_dir / "config.yaml", self.config.clone()
        if trainer.resumed:
            # a resumed run keeps the arguments with which it began
            before = (read_yaml(path) if path.is_file() else None) or {}
            hint = "the run did not write it; restore its file, or remove this one"
            require(isinstance(before, Mapping), str(path), before, hint)
            for key, default in (("ckpt_path", None), ("weights", None), ("allow_changes", False)):
                config[key] = before.get(key, default)
        if trainer.run.folder.changed:
            config["ckpt_path"] = trainer.run.folder.changes[-1]["ckpt_path"]  # `last` would soon be another
        how: dict[str, Any] = {"skip_unset": False, "overwrite": True, "multifile": False}
        write_atomically(path, lambda partial: self.parser.save(config, partial, **how))


class FederatedCLI(LightningCLI):
    """LightningCLI for a :class:`FederatedTrainer`: keys ``seed_everything, model, data, method, trainer``.

    Args:
        args: command line, None for ``sys.argv``.
    """

    trainer: Any

    def __init__(self, args: Any = None) -> None:
        words = sys.argv[1:] if args is None else args
        self._command = words[0] if isinstance(words, list) and words and words[0] in self.subcommands() else None
        strict = {"allow_abbrev": False}
        about = "Federated learning on heterogeneous clients, on PyTorch Lightning and Fabric."
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            save_config_callback=None,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={
                **strict,
                "prog": program(),
                "description": about,
                **{command: dict(strict) for command in self.subcommands()},
            },
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {command: {"model", "datamodule"} for command in FederatedTrainer.commands}

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Refuse an optimizer that a subclass adds without a link, since configure_optimizers is left to the model."""
        for key, (_, link_to) in {**parser._optimizers, **parser._lr_schedulers}.items():
            hint = "the model's configure_optimizers would not use it; pass link_to=model.init_args.NAME"
            require(link_to != "AUTOMATIC", f"add_{key}_args: link_to", link_to, hint)
        LightningCLI.link_optimizers_and_lr_schedulers(parser)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        # a parser of another command is not used, and its arguments would take most of the start-up time
        if self._command not in (None, subcommand):
            return self.init_parser(**kwargs)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        taken_names = {"self", "model", "datamodule", *self._subcommand_method_arguments[subcommand]}
        types, about = get_type_hints(FederatedTrainer.fit), "an argument of fit, so that its config serves here too"
        for name, parameter in signature(FederatedTrainer.fit).parameters.items():
            if name not in taken_names:
                parser.add_argument(f"--{name}", type=types[name], default=parameter.default, help=about)
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # LightningCLI takes only a Trainer of Lightning's own here
        parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, sub_configs=True)
        parser.add_subclass_arguments(LightningModule, "model", fail_untyped=False, required=True)
        # sites bring their data
        has_data = self._command != "federate"
        parser.add_subclass_arguments(LightningDataModule, "data", fail_untyped=False, required=has_data)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs, config = super()._prepare_subcommand_kwargs(subcommand), self.config_init[subcommand]
        for name in ("ckpt_path", "weights", "allow_changes"):
            if name not in kwargs and config[name]:
                self.trainer.warn(f"{name}={config[name]} has no part in {subcommand}")
        return kwargs

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        words = sys.argv[1:] if args is None else args
        for key in LISTS:
            values = values_of(words, f"--{key}")
            hint = f"the last would replace the others; add to a list by --{key}+=NAME"
            require(len(values) < 2, f"--{key}", values, hint)
        if self._command in ("validate", "test", "predict"):
            paths = [Path(value) for value in values_of(words, "--ckpt_path")]
            of_run = paths[-1].parents[1] / "config.yaml" if paths and in_place(paths[-1]) else None
            if of_run is not None and of_run.is_file():  # the command line overrides the config of the run
                words = [words[0], f"--config={of_run}", *words[1:]]
        # Lightning warns where sys.argv has arguments as well
        with patched(sys, argv=sys.argv[:1]):
            super().parse_arguments(parser, words)
        config = self.config[self.config["subcommand"]]
        if isinstance(config["method"], Namespace):
            config["method"] = [config["method"]]  # readers of a run's config expect a list

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning's version would put the checkpoint's class and arguments into the model."""

    def _set_seed(self) -> None:
        check_resolved(self.config[self.subcommand])
        super()._set_seed()

    def instantiate_classes(self) -> None:
        with building():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer: Any = super().instantiate_trainer(**kwargs)
        if self.subcommand in ("fit", "doctor", "federate", "site"):
            config, parser = self.config[self.subcommand], self._parser(self.subcommand)
            trainer.config = yaml.safe_load(parser.dump(config, skip_unset=False))
            if self.subcommand == "fit":
                trainer.callbacks.append(_SaveConfig(parser, config))
        return trainer

    def after_fit(self) -> None:
        """Print the last metrics and the run's folder, on one line."""
        metrics, where = self.trainer.metrics, self.trainer.run_dir or "no folder (fast_dev_run)"
        texts = [f"{name} {format_value(name, metrics[name])}" for name in final_names(metrics)]
        self._print(", ".join([count(len(self.trainer.history), "round"), *texts, f"in {where}"]))

    def validate(self, **kwargs: Any) -> None:
        self._print_metrics(self.trainer.validate, kwargs)

    def test(self, **kwargs: Any) -> None:
        self._print_metrics(self.trainer.test, kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Write the outputs into a file, and print where it is, on one line."""
        self._warn_of_weights(kwargs)
        if not kwargs["output"]:
            # in the folder of the run or of another checkpoint, else in the folder of all runs
            versions = folder_of_versions(self.trainer, MethodList(as_list(kwargs["method"])))
            path = kwargs["ckpt_path"] and find_checkpoint(kwargs["ckpt_path"], versions)
            folder = path and (path.parents[1] if in_place(path) else path.parent)
            kwargs["output"] = (folder or self.trainer.default_root_dir) / "predictions.pt"
        self.trainer.predict(**kwargs)
        self._print(f"predictions in {kwargs['output']}")

    def partition(self, model: Any, **kwargs: Any) -> None:
        """Deal the data of a config out; its model has no part in this."""
        self.trainer.partition(**kwargs)

    def replay(self, **kwargs: Any) -> None:
        """Print the logged values on one line; re-raise an exception of the user's code itself."""
        try:
            logged = self.trainer.replay(**kwargs)
        except ClientError as error:
            if not from_users_code(error):
                raise
            cause: Any = error.__cause__
            add_note(cause, f"client {kwargs['client']}, round {kwargs['round']}")
        else:
            steps = f"{logged['steps']} local steps"
            values = [f"{name} {value:.4g}" for name, value in logged.items() if name != "steps"]
            print(f"client {kwargs['client']}, round {kwargs['round']}: {', '.join([steps, *values])}")
            return
        # after the block, so that the user's own exception is the last one, and a debugger stops at its line
        raise cause

    def federate(self, **kwargs: Any) -> None:
        """Write the app, and print where it is and what comes next."""
        print(f"app in {self.trainer.federate(**kwargs)}; docs/federation.md describes the parties")

    def doctor(self, **kwargs: Any) -> None:
        """Print the plan of the run."""
        rank_zero_only(print)(as_text(self.trainer.doctor(**kwargs)))

    def _warn_of_weights(self, kwargs: Mapping[str, Any]) -> None:
        """Warn where no file gives the weights: a model that was just built says little."""
        if kwargs["ckpt_path"] is None and kwargs["weights"] is None:
            self.trainer.warn("no ckpt_path and no weights: the model has the weights it was built with")

    def _print_metrics(self, evaluate: Callable[..., Mapping[str, float]], kwargs: Mapping[str, Any]) -> None:
        self._warn_of_weights(kwargs)
        texts = []
        for name, value in evaluate(**kwargs).items():
            if "domain/" not in name:  # the callbacks have shown the domains as a table
                texts.append(f"{name} {format_value(name, value)}")
        self._print(", ".join(texts))

    def _print(self, line: str) -> None:
        if self.trainer.global_rank == 0:
            print(line)


def usage_error(error: BaseException) -> UsageError | None:
    """The UsageError among the causes of ``error``, None without one: jsonargparse wraps errors of constructors."""
    return next((cause for cause in causes_of(error) if isinstance(cause, UsageError)), None)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each warning as one line, without the line of code that raised it, and once.

    Python forgets which warnings it has shown whenever a filter changes.
    """
    before, printed = warnings.formatwarning, set[str]()

    def line(message: Warning | str, *_: Any, **__: Any) -> str:
        text = "" if str(message) in printed else f"warning: {message}\n"
        printed.add(str(message))
        return text

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = before


def from_own_files(error: BaseException) -> bool:
    """Whether a file of the user's is among the frames of an error."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(is_user_code(frame.f_code.co_filename) for frame, _ in frames)


def from_users_code(error: ClientError) -> bool:
    """Whether an exception of another kind made a client fail."""
    return error.__cause__ is not None and not isinstance(error.__cause__, ClientError)


def command_that_resumes(stopped: Stopped, words: list[str]) -> str:
    """The command that resumes a run from its last checkpoint, or begins it again where it has none."""
    if stopped.checkpoint is not None:
        keys = ("--ckpt_path", "--weights")
        pairs, words = zip(words, ["", *words], strict=False), []
        for word, before in pairs:
            if before not in keys and word.split("=")[0] not in keys:
                words.append(word)
        words += ["--ckpt_path", str(stopped.checkpoint)]
        if stopped.weights:
            words.append("--weights=null")  # weights of a config would begin the run from scratch
    return f"{program()} {shlex.join(words)}"


def main(args: list[str] | None = None) -> None:
    """Run a command that needs torch; its errors end the program as :func:`fl_lightning.cli.main` says."""
    find_own_classes()
    try:
        with plain_warnings():
            FederatedCLI(args)
    except Stopped as stopped:
        if getattr(rank_zero_only, "rank", 0) == 0:
            command = command_that_resumes(stopped, sys.argv[1:] if args is None else args)
            print(f"{stopped}; go on: {command}", file=sys.stderr)
        sys.exit(stopped.status)
    except ClientError as error:
        repeat = ""
        if error.record is not None:
            _, round_, _, k = error.record.stem.split("-")
            config = error.record.parents[1] / "config.yaml"
            visit = ["--config", str(config), "--ckpt_path", str(error.record), "--round", round_, "--client", k]
            repeat = f"; repeat it: {program()} replay {shlex.join(visit)}"
        print(f"error: {error}{repeat}", file=sys.stderr)
        if from_users_code(error):
            raise
        sys.exit(1)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not from_own_files(error):
            raise  # who reads the output has closed it, as `head` does
        usage = usage_error(error)
        if usage is not None:
            print_usage_error(usage)
            sys.exit(2)
        # a parser wraps errors from the constructor of a user's class
        cause = next(filter(from_own_files, causes_of(error)), error)
        print("; ".join([f"error: {with_location(cause)}", *getattr(error, "__notes__", [])]), file=sys.stderr)
    else:
        return
    # after the block, so that the traceback has no errors of the parser
    raise cause
