"""Bad inputs and the keys in their error lines; ``experiments/reliability/bad_input.py`` makes a table of them.

An input is an option or the text of a config, applied after the small config below.
"""

from __future__ import annotations

import math
from pathlib import Path

BASE = """\
model:
  class_path: ImageClassifier
  init_args:
    encoder: {class_path: Logistic}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.9}}
data:
  class_path: Digits
  init_args: {num_clients: 5, train_size: 100, test_size: 20, partitioner: {class_path: Dirichlet}}
method: [FedProx]
trainer: {max_rounds: 1, logger: false, accelerator: cpu}
"""


def arguments(given: str, folder: Path) -> list[str]:
    """The command line of an input, whose configs are written into a folder."""
    (folder / "base.yaml").write_text(BASE)
    (folder / "given.yaml").write_bytes(given.encode("utf-8", "surrogateescape"))
    last = given if given.startswith("--") else f"--config={folder / 'given.yaml'}"
    return ["fit", f"--config={folder / 'base.yaml'}", f"--trainer.default_root_dir={folder / 'runs'}", last]


def cell(text: str) -> str:
    """A text as code in a cell of a table."""
    lines = (line if len(line) <= 300 else f"{line[:80]} ... {line[-30:]}" for line in text.rstrip("\n").split("\n"))
    plain = "".join(one if one.isprintable() else ascii(one)[1:-1].replace("\\udc", "\\x") for one in " ; ".join(lines))
    return "`" + plain.replace("|", "\\|").replace("`", "'") + "`"


# by mistake: the input, and a text that its line must contain
BAD: dict[str, tuple[str, str]] = {
    # null
    "max_rounds null": ("trainer: {max_rounds: null}", "trainer.max_rounds=null"),
    "num_clients null": ("data: {init_args: {num_clients: null}}", "Digits.num_clients=null"),
    "mu null": ("method: [{class_path: FedProx, init_args: {mu: null}}]", "FedProx.mu=null"),
    # a number out of range
    "rounds below 0": ("--trainer.max_rounds=-1", "trainer.max_rounds=-1"),
    "participation 2": ("trainer: {participation: 2.0}", "trainer.participation=2.0"),
    "cohort of all and more": ("trainer: {cohort_size: 99}", "trainer.cohort_size=99"),
    "clip of 0": ("trainer: {gradient_clip_val: 0.0}", "trainer.gradient_clip_val=0.0"),
    "name of a folder above": ("trainer: {name: ../x}", "trainer.name='../x'"),
    "no device": ("trainer: {devices: 0}", "trainer.devices=0"),
    "seed below 0": ("seed_everything: -1", "seed_everything=-1"),
    "batch of 0": ("data: {init_args: {batch_size: 0}}", "data.batch_size=0"),
    "more clients than examples": (
        "data: {init_args: {num_clients: 100000, partitioner: IID}}",
        "data.num_clients=100000",
    ),
    "more examples than there are": ("data: {init_args: {train_size: 9999}}", "data.train_size=9999"),
    "alpha of 0": (
        "data: {init_args: {partitioner: {class_path: Dirichlet, init_args: {alpha: 0.0}}}}",
        "Dirichlet.alpha=0.0",
    ),
    "all at one client": ("data: {init_args: {partitioner: {class_path: Pooled, init_args: {}}}}", "Pooled=5"),
    "mu below 0": ("--method.mu=-1", "FedProx.mu=-1.0"),
    # an optimizer or a schedule
    "lr below 0": ("--model.optimizer.lr=-1", "model=ImageClassifier: configure_optimizers"),
    "lr nan": ("model: {init_args: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: .nan}}}}", "SGD.lr=nan"),
    "lr abc": ("model: {init_args: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: abc}}}}", "SGD.lr='abc'"),
    "learning_rate": ("--model.optimizer.learning_rate=1", "'learning_rate'"),
    "SDG": ("--model.optimizer.class_path=torch.optim.SDG", "model.optimizer='torch.optim.SDG'"),
    "server lr below 0": (
        "trainer: {server_optimizer: {class_path: torch.optim.SGD, init_args: {lr: -1.0}}}",
        "trainer.server_optimizer",
    ),
    "ExponentialLR of -1": (
        "trainer: {max_rounds: 3, client_lr_scheduler: {class_path: torch.optim.lr_scheduler.ExponentialLR, "
        "init_args: {gamma: -1.0}}}",
        "trainer.client_lr_scheduler",
    ),
    "a scheduler without its number": (
        "trainer: {client_lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {}}}",
        "StepLR.step_size",
    ),
    # a key or a class that does not exist
    "alhpa": ("--data.partitioner.alhpa=1", "'alhpa'"),
    "Dirichet": ("data: {init_args: {partitioner: Dirichet}}", "data.partitioner='Dirichet'"),
    "Clok": ("--trainer.clock=Clok", "Clock?"),
    "a sampler's help": ("--trainer.sampler.help=Foo", "UniformSampler"),
    "FedPrx": ("method: [FedPrx]", "method='FedPrx'"),
    "max_epochs": ("--trainer.max_epochs=3", "trainer.max_rounds"),
    "the second of two loggers": (
        "trainer: {logger: [{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: x}}, 5]}",
        "trainer.logger='5'",
    ),
    "a short name of Lightning's logger without its folder": ("trainer: {logger: [CSVLogger]}", "CSVLogger.save_dir"),
    "a package that is not there": ("--model=nowhere.Net", "model='nowhere.Net'"),
    "a class of another kind": ("--model=collections.Counter", "model='collections.Counter'"),
    "the bare Method": ("method: [Method]", "method='Method'"),
    "mu beside class_path": ("method: [{class_path: FedProx, mu: 1}]", "init_args"),
    "a method twice": ("method: [FedProx, FedProx]", "method=['fedprox', 'fedprox']"),
    "a callback of Lightning's": (
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        "trainer.callbacks='lightning.pytorch.callbacks.ModelCheckpoint'",
    ),
    "a short name of a callback of Lightning's": (
        "--trainer.callbacks+=ModelCheckpoint",
        "fl_lightning.callbacks.BestCheckpoint",
    ),
    "a callback of Lightning's alone": (
        "--trainer.callbacks=lightning.pytorch.callbacks.DeviceStatsMonitor",
        "fl_lightning.callbacks.CostLedger",
    ),
    "an argument of no class": ("--trainer.server_optimizer={init_args: {a: 1}}", "trainer.server_optimizer"),
    "a class in place of a list": ("--method=torch.optim.SGD", "method='torch.optim.SGD'"),
    # a value of another kind
    "trainer 3": ("trainer: 3", "trainer=3"),
    "model 3": ("model: 3", "model='3'"),
    "local_steps 1.5": ("trainer: {local_steps: 1.5}", "trainer.local_steps='1.5'"),
    "buffers lost": ("trainer: {buffers: lost}", "trainer.buffers='lost'"),
    # YAML that is damaged or ambiguous
    "a tab": ("trainer:\n\tmax_rounds: 2", "given.yaml, line 2, column 1"),
    "Latin-1": ("trainer: {name: caf\udce9}", "given.yaml, line 1, column 20"),
    "two documents": ("trainer: {name: a}\n---\ntrainer: {name: b}", "given.yaml, line 2, column 1"),
    "unclosed": ("trainer: {max_rounds: 2\nmethod: [FedProx]", "given.yaml, line 2, column 7"),
    "a list": ("- trainer", "given.yaml"),
    "a section twice": (
        "trainer: {max_rounds: 2}\nmethod: [FedProx]\ntrainer: {name: a}",
        "given.yaml, line 3, column 1",
    ),
    "a key twice on the command line": (
        "--trainer={max_rounds: 2, max_rounds: 3}",
        "trainer: '{max_rounds: 2, max_rounds: 3}', line 1, column 17",
    ),
    "octal": ("data: {init_args: {num_clients: 010}}", "given.yaml, line 1, column 33"),
    # incompatible values
    "inputs of another size": (
        "model: {init_args: {encoder: {class_path: MLP, init_args: {in_features: 60}}}}",
        "MLP.in_features=60",
    ),
    "too few classes": ("model: {init_args: {num_classes: 3}}", "model.num_classes=3"),
    "SCAFFOLD with momentum": ("method: [SCAFFOLD]", "momentum=0.9"),
    "half precision": ("trainer: {precision: 16-mixed}", "trainer.precision='16-mixed'"),
    "precision 17": ("trainer: {precision: 17}", "trainer.precision=17"),
    "a strategy": ("trainer: {strategy: ddp}", "trainer.strategy='ddp'"),
}

# what is refused before torch is imported: the command line, the names in its line, and the text of its file
WITHOUT_TORCH: tuple[tuple[list[str], list[str], str], ...] = (
    (["fit", "--config", "nowhere.yaml"], ["config='nowhere.yaml'"], ""),
    (["fit", "--config", "smoke/fedavgg"], ["config='smoke/fedavgg'", "smoke/fedavg"], ""),
    (["fit", "--config", "{file}"], ["given.yaml, line 2"], "trainer: {max_rounds: 3\n"),
    (["fit", "--config={file}"], ["trianer", "trainer?"], "trianer: {max_rounds: 3}\n"),
    (["test", "--config", "{file}"], ["trainer.max_round", "trainer.max_rounds?"], "trainer: {max_round: 3}\n"),
    (["fit", "--config={{trainer: {{max_epochs: 3}}}}"], ["trainer.max_epochs", "trainer.max_rounds"], ""),
    (["doctor", "--trainer.callback+=Scores"], ["--trainer.callback+", "trainer.callbacks?"], ""),
    (["fit", "--ckpt", "last"], ["--ckpt"], ""),
    (["fit", "--optimizer", "SGD", "--optimizer.lr=0.1"], ["--optimizer", "model.optimizer"], ""),
    (["fit", "--config=smoke/fedavg", "--method=FedProxx"], ["method='FedProxx'", "FedProx?"], ""),
    (
        ["fit", "--config", "{file}"],
        ["method: FedProx", "'alpha'", "mu"],
        "method: [{class_path: FedProx, init_args: {alpha: 1}}]",
    ),
    (["test", "--ckpt_path", "nowhere/last.ckpt"], ["ckpt_path='nowhere/last.ckpt'"], ""),
    (["fit", "--config", "{file}", "--ckpt_path=null"], ["weights='nowhere.pt'"], "weights: nowhere.pt\n"),
)

# arguments of classes of the package that are out of range, by the name of the class; a dictionary has the bad one last
OUT_OF_RANGE: dict[str, list[dict[str, object]]] = {
    "ALIE": [{"clients": [-1]}],
    "APFL": [{"alpha": 1.1}, {"alpha_decay": -1}],
    "AutoAugment": [{"policy": "mnist"}],
    "BestCheckpoint": [{"monitor": "loss", "mode": "most"}],
    "CCVR": [{"samples_per_class": 0}, {"epochs": 0}, {"lr": 0.0}, {"batch_size": 0}],
    "CenteredClipping": [{"tau": 0}, {"iterations": 0}],
    "ClassesPerClient": [{"n": 0}],
    "ClientDirichlet": [{"alpha": math.inf}, {"sigma": -0.1}],
    "CostLedger": [{"every_n_rounds": 0}],
    "DPFedAvg": [{"clip": math.inf}, {"delta": 0.0}],
    "DeviationBound": [{"examples": 0}, {"tau": -1}, {"majority": -1}],
    "Dirichlet": [{"alpha": 0.0}, {"alpha": -1.0}, {"min_size": -1}, {"max_draws": 0}],
    "Ditto": [{"lambda_": -1}],
    "DomainMetrics": [{"every_n_rounds": 0}, {"max_domains": 1}],
    "ETFClassifier": [
        {"in_features": 4, "num_classes": 10, "width": 8},
        {"in_features": 4, "num_classes": 10, "scale": 0.0},
    ],
    "EarlyStopping": [{"monitor": "loss", **bad} for bad in ({"mode": "up"}, {"patience": -1}, {"min_delta": -0.1})],
    "Embedding": [{"every_n_rounds": 0}, {"examples": 7}, {"classes": []}, {"perplexity": 0}],
    "FedALA": [{"layers": -1}, {"rate": -1}, {"sample": 0}, {"window": 1}, {"threshold": -1}],
    "FedAS": [{"alignment_epochs": -1}, {"alignment_rate": -1}],
    "FedAMP": [{"a": 0}, {"sigma": 0}, {"weight": -1}, {"heuristic": True, "own": 2}, {"own": 0.5}],
    "FedASAM": [{"rho": -1}, {"eta": -1}],
    "FedAsync": [{"alpha": 0.0}, {"power": -1.0}, {"after": -1}],
    "FedBuff": [{"power": -1.0}],
    "FedCKA": [{"layers": []}, {"bandwidth": 0.2}, {"similarity": "rbf", "bandwidth": 0}],
    "FedDisco": [{"a": -1}],
    "FedExP": [{"eps": -1}, {"eps_decay": 0}],
    "FedPer": [{"layers": -1}],
    "FedRep": [{"body_epochs": 0}],
    "FedRoD": [{"gamma": -1}],
    "FedSAM": [{"rho": -1}],
    "FedUV": [{"spectral": -1}],
    "FedVLS": [{"beta": -1}, {"lam": -1}],
    "FixBN": [{"share": 1.5}],
    "Gaussian": [{"std": -1}],
    "GeometricMedian": [{"iterations": 0}, {"nu": 0}, {"tolerance": -1}],
    "HetLoRA": [{"ranks": []}, {"ranks": [0, 2]}],
    "IFCA": [{"clusters": 0}, {"init_std": -1}],
    "IPM": [{"start": -1}, {"epsilon": -1}],
    "LayerAlignment": [{"number": 0}, {"layers": ["classifier"]}],
    "LayerSimilarity": [{"layers": []}, {"examples": 7}, {"max_clients": 1}],
    "LoRAProduct": [{"rank": 0}],
    "LocalLosses": [{"every_n_rounds": 0}],
    "LogitAdjustment": [{"tau": -1}, {"floor": -0.1}, {"when": "post_hoc", "prior": "local"}],
    "MultiKrum": [{"f": -1}, {"chosen": 0}],
    "NNM": [{"f": -1}],
    "NeuralCollapse": [{"every_n_rounds": 0}],
    "PFedMe": [{"lambda_": -1}, {"inner_steps": 0}, {"beta": -1}, {"outer_lr": 0}],
    "PerClassAccuracy": [{"every_n_rounds": 0}, {"max_clients": 0}, {"examples": 0}, {"majority": 0}],
    "PerFedAvg": [{"inner_lr": -1}, {"delta": 0}],
    "PersonalAccuracy": [{"max_clients": 0}, {"examples": 0}, {"fine_tune_steps": -1}, {"fine_tune": "first"}],
    "QuantityDirichlet": [{"beta": 0.0}, {"min_size": -1}],
    "RandomCrop": [{"padding": 0}],
    "RandomFlip": [{"p": 1.1}],
    "RandomRotation": [{"degrees": 200}],
    "Scores": [{"every_n_rounds": 0}, {"local_steps": -1}, {"last_k": 0}],
    "Shards": [{"per_client": 0}],
    "SignFlip": [{"share": 1.1}, {"scale": 0}],
    "SpectrumMonitor": [
        *({"every_n_rounds": 0}, {"max_scalars": 1}, {"threshold": -0.1}),
        *({"local_every_n_rounds": 0}, {"examples": 1}),
    ],
    "TrimmedMean": [{"f": -1}, {"share": 0.5}],
}
