"""Bad inputs, and how the line begins that each gets; ``experiments/reliability/bad_input.py`` makes a table of them.

An input is an option, or the text of a config, that follows the small config below.
"""

from __future__ import annotations

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


def raw(content: bytes) -> str:
    """The bytes of a config as a text."""
    return content.decode("utf-8", "surrogateescape")


def trainer(**arguments: str) -> str:
    """A config of the trainer's arguments."""
    return "trainer: {" + ", ".join(f"{name}: {value}" for name, value in arguments.items()) + "}"


def model(**arguments: str) -> str:
    """A config of the model's arguments."""
    return "model: {init_args: {" + ", ".join(f"{name}: {value}" for name, value in arguments.items()) + "}}"


def data(**arguments: str) -> str:
    """A config of the data's arguments."""
    return "data: {init_args: {" + ", ".join(f"{name}: {value}" for name, value in arguments.items()) + "}}"


def optimizer(name: str, **arguments: str) -> str:
    """A config of a client optimizer."""
    given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return model(optimizer=f"{{class_path: torch.optim.{name}, init_args: {{{given}}}}}")


def server(name: str, **arguments: str) -> str:
    """A config of a server optimizer."""
    given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return trainer(server_optimizer=f"{{class_path: {name}, init_args: {{{given}}}}}")


def schedule(name: str, **arguments: str) -> str:
    """A config of a schedule of the clients' rates."""
    given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    path = f"torch.optim.lr_scheduler.{name}"
    return trainer(client_lr_scheduler=f"{{class_path: {path}, init_args: {{{given}}}}}")


def method(text: str) -> str:
    """A config of the methods."""
    return f"method: {text}"


def partitioner(name: str, **arguments: str) -> str:
    """A config of a partitioner."""
    given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return data(partitioner=f"{{class_path: {name}, init_args: {{{given}}}}}")


def encoder(name: str, **arguments: str) -> str:
    """A config of an encoder."""
    given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return model(encoder=f"{{class_path: {name}, init_args: {{{given}}}}}")


# what is wrong: the input, and the beginning of its line
BAD: dict[str, tuple[str, str]] = {
    # null, where there is a number
    "max_rounds null": (trainer(max_rounds="null"), "trainer.max_rounds=null: give a value of type int"),
    "local_epochs null": (trainer(local_epochs="null"), "trainer.local_epochs=null: give a value of type int"),
    "participation null": (trainer(participation="null"), "trainer.participation=null: give a value of type float"),
    "eval_every null": (trainer(eval_every_n_rounds="null"), "trainer.eval_every_n_rounds=null: give a value"),
    "checkpoint null": (trainer(checkpoint_every_n_rounds="null"), "trainer.checkpoint_every_n_rounds=null: give"),
    "min_clients null": (trainer(min_clients="null"), "trainer.min_clients=null: give a value of type int"),
    "num_nodes null": (trainer(num_nodes="null"), "trainer.num_nodes=null: give a value of type int"),
    "workers null": (trainer(workers_per_device="null"), "trainer.workers_per_device=null: give a value of type int"),
    "client_memory null": (trainer(client_memory="null"), "trainer.client_memory=null: give a value of type float"),
    "fast_dev_run null": (trainer(fast_dev_run="null"), "trainer.fast_dev_run=null: give a value of type"),
    "num_clients null": (data(num_clients="null"), "Digits.num_clients=null: give a value of type int"),
    "batch_size null": (data(batch_size="null"), "Digits.batch_size=null: give a value of type int"),
    "alpha null": (partitioner("Dirichlet", alpha="null"), "Dirichlet.alpha=null: give a value of type float"),
    "mu null": (method("[{class_path: FedProx, init_args: {mu: null}}]"), "FedProx.mu=null: give a value of type"),
    "null on the command line": ("--trainer.max_rounds=null", "trainer.max_rounds=null: give a value of type int"),
    # numbers out of range
    "rounds below 0": ("--trainer.max_rounds=-1", "trainer.max_rounds=-1: give 0 or more rounds"),
    "too many rounds": (trainer(max_rounds="1000000000000"), "trainer.max_rounds=1000000000000: give 0 or more"),
    "too many epochs": (trainer(local_epochs="1000000000000"), "trainer.local_epochs=1000000000000: give 1 or more"),
    "too many steps": (trainer(local_steps="1000000000000"), "trainer.local_steps=1000000000000: give 1 or more"),
    "participation nan": (trainer(participation=".nan"), "trainer.participation=nan: give a share in (0, 1]"),
    "participation 2": (trainer(participation="2.0"), "trainer.participation=2.0: give a share in (0, 1]"),
    "cohort of 0": (trainer(cohort_size="0"), "trainer.cohort_size=0: give 1 or more, or null"),
    "cohort of all and more": (trainer(cohort_size="99"), "trainer.cohort_size=99: there are 5 clients"),
    "memory nan": (trainer(client_memory=".nan"), "trainer.client_memory=nan: give 0 or more GiB"),
    "clip of 0": (trainer(gradient_clip_val="0.0"), "trainer.gradient_clip_val=0.0: give a norm above 0"),
    "fast_dev_run -1": (trainer(fast_dev_run="-1"), "trainer.fast_dev_run=-1: give true, false or a number"),
    "too many threads": (trainer(threads_per_worker="1000000"), "trainer.threads_per_worker=1000000: give 1 or more"),
    "two workers on a CPU": (trainer(workers_per_device="2"), "trainer.workers_per_device=2: on a"),
    "too many workers on one": (trainer(workers_per_device="1000000000"), "trainer.workers_per_device=1000000000:"),
    "too many nodes": (trainer(num_nodes="1000000000"), "trainer.num_nodes=1000000000: give 1 or more"),
    "name of a folder above": (trainer(name="../x"), "trainer.name='../x': give the name of one folder"),
    "name with a newline": (trainer(name='"a\\nb"'), "trainer.name='a\\nb': give the name of one folder"),
    "no device": (trainer(devices="0"), "trainer.devices=0: give a number from 1"),
    "seed below 0": ("seed_everything: -1", "seed_everything=-1: give a seed from 0 to 4294967295"),
    "seed of 65 bits": ("seed_everything: 18446744073709551616", "seed_everything=18446744073709551616: give a seed"),
    "batch of 0": (data(batch_size="0"), "data.batch_size=0: give 1 or more"),
    "no client": (data(num_clients="0"), "data.num_clients=0: give 1 or more"),
    "more clients than examples": (
        data(num_clients="100000", partitioner="IID"),
        "data.num_clients=100000: there are 100 training samples",
    ),
    "more examples than there are": (data(train_size="9999"), "data.train_size=9999: there are 1437 samples"),
    "images too large": (data(image_size="64000000000"), "data.image_size=64000000000: give 1 or more, up to 512"),
    "mean nan": (data(mean="[.nan]"), "data.mean=[nan]: give finite numbers"),
    "std of 0": (data(std="[0.0]"), "data.std=[0.0]: give numbers above 0"),
    "mean of three channels": (data(mean="[0.1, 0.2, 0.3]"), "data.mean=[0.1, 0.2, 0.3]: give one number"),
    "noise infinite": (data(client_noise=".inf"), "data.client_noise=inf: give 0 or more"),
    "all for validation": (data(val_fraction="1.0"), "data.val_fraction=1.0: give a share in [0, 1)"),
    "alpha of 0": (partitioner("Dirichlet", alpha="0.0"), "Dirichlet.alpha=0.0: give a number above 0"),
    "alpha infinite": (partitioner("Dirichlet", alpha=".inf"), "Dirichlet.alpha=inf: give a number above 0"),
    "too many shards": (partitioner("Shards", per_client="1000"), "Shards.per_client=1000: 5 clients need 5000 shards"),
    "all at one client": (partitioner("Pooled"), "data.num_clients with the partitioner Pooled=5: give 1"),
    "domains that are not there": (partitioner("ByDomain"), "data.partitioner='ByDomain': Digits has no domains"),
    "misspelled method": ("--method=Fedprox", "method='Fedprox': no such class; give one of"),
    "mu below 0": ("--method.mu=-1", "FedProx.mu=-1.0: give 0 or more"),
    # sizes that fill the memory
    "width of 1e9": (
        encoder("FedUVCNN", width="1000000000"),
        "FedUVCNN.width=1000000000: a layer would have 3.7e+22 weights",
    ),
    "hidden of 1e12": (encoder("MLP", hidden="[1000000000000]"), "MLP.hidden=[1000000000000]: a layer would have"),
    "inputs of 1e12": (encoder("MLP", in_features="1000000000000"), "MLP.in_features=1000000000000: a layer would"),
    "channels of 1e9": (encoder("MOONCNN", in_channels="1000000000"), "in_channels=1000000000: give 1 or more, up to"),
    "projector of 1e9": (
        model(projector="{class_path: Projector, init_args: {width: 1000000000}}"),
        "Projector.width=1000000000: a layer would have 1.0e+18 weights",
    ),
    "classes of 1e10": (model(num_classes="10000000000"), "model.num_classes=10000000000: a layer would have"),
    "padding of 1e9": (
        data(augment="[{class_path: RandomCrop, init_args: {padding: 1000000000}}]"),
        "RandomCrop.padding=1000000000: give 1 or more, up to 512",
    ),
    # optimizers and schedules
    "lr below 0": ("--model.optimizer.lr=-1", "model=ImageClassifier: configure_optimizers: Invalid learning rate: -1"),
    "lr nan": (optimizer("SGD", lr=".nan"), "model=ImageClassifier: configure_optimizers: SGD.lr=nan: give a finite"),
    "lr null": (optimizer("SGD", lr="null"), "SGD.lr=null: give a value of type"),
    "lr abc": (optimizer("SGD", lr="abc"), "SGD.lr='abc': give a value of type float"),
    "momentum below 0": (
        optimizer("SGD", lr="0.1", momentum="-1.0"),
        "model=ImageClassifier: configure_optimizers: Invalid momentum value: -1.0; give",
    ),
    "weight decay below 0": (
        optimizer("SGD", lr="0.1", weight_decay="-1.0"),
        "model=ImageClassifier: configure_optimizers: Invalid weight_decay value: -1.0; give",
    ),
    "learning_rate": ("--model.optimizer.learning_rate=1", "model.optimizer: SGD has no 'learning_rate'; it takes lr"),
    "SDG": ("--model.optimizer.class_path=torch.optim.SDG", "model.optimizer='torch.optim.SDG': module 'torch.optim'"),
    "server lr below 0": (server("torch.optim.SGD", lr="-1.0"), "trainer.server_optimizer: Invalid learning rate: -1"),
    "server lr nan": (server("torch.optim.SGD", lr=".nan"), "trainer.server_optimizer: SGD.lr=nan: give a finite"),
    "server LBFGS": (server("torch.optim.LBFGS"), "trainer.server_optimizer: LBFGS.step() missing 1 required"),
    "server SparseAdam": (server("torch.optim.SparseAdam"), "trainer.server_optimizer: SparseAdam does not support"),
    "server FedAdam tau": (server("FedAdam", tau="0.0"), "FedAdam.tau=0.0: give a number above 0"),
    "StepLR of 0": (schedule("StepLR", step_size="0"), "trainer.client_lr_scheduler: StepLR(step_size=0, gamma=0.1)"),
    "CosineAnnealingLR of 0": (
        schedule("CosineAnnealingLR", T_max="0"),
        "trainer.client_lr_scheduler: CosineAnnealingLR(T_max=0, eta_min=0",
    ),
    "ExponentialLR of -1": (
        "trainer: {max_rounds: 3, client_lr_scheduler: {class_path: torch.optim.lr_scheduler.ExponentialLR, "
        "init_args: {gamma: -1.0}}}",
        "trainer.client_lr_scheduler: the factor of round 1=-1.0: a rate must be finite and not below 0",
    ),
    "a scheduler without its number": (schedule("StepLR"), "StepLR.step_size: it is required; give a value"),
    # keys and classes that do not exist
    "alhpa": ("--data.partitioner.alhpa=1", "data.partitioner: Dirichlet has no 'alhpa'; it takes alpha"),
    "alhpa in a file": (partitioner("Dirichlet", alhpa="1"), "data.partitioner: Dirichlet has no 'alhpa'; it takes"),
    "Dirichet": (data(partitioner="Dirichet"), "data.partitioner='Dirichet': no such class; give one of ByDomain"),
    "ImageClasifier": ("--model=ImageClasifier", "model='ImageClasifier': no such class; give one of ImageClassifier"),
    "Digit": ("--data=Digit", "data='Digit': no such class; give one of CIFAR10"),
    "FedPrx": ("method: [FedPrx]", "method='FedPrx': no such class; give one of DPFedAvg, DeCov"),
    "RandomCop": (data(augment="[RandomCop]"), "data.augment='RandomCop': no such class; give one of AutoAugment"),
    "SpectrumMonitr": ("--trainer.callbacks+=SpectrumMonitr", "trainer.callbacks='SpectrumMonitr': no such class"),
    "widht": (encoder("FedUVCNN", widht="1"), "model.encoder: FedUVCNN has no 'widht'; it takes width, in_channels"),
    "batch_sise": ("--data.batch_sise=3", "data: Digits has no 'batch_sise'; it takes image_size"),
    "max_epochs": ("--trainer.max_epochs=3", "no such key (--help lists them): --trainer.max_epochs=3"),
    "max_round in a file": (trainer(max_round="3"), "trainer.max_round: no such key (--help lists them)"),
    "a package that is not there": ("--model=nowhere.Net", "model='nowhere.Net': No module named 'nowhere'"),
    "a class that is no model": ("--model=collections.Counter", "model='collections.Counter': it is no subclass of"),
    "the bare Method": ("method: [Method]", "method='Method': it is the base of all methods, and does nothing"),
    "mu beside class_path": (method("[{class_path: FedProx, mu: 1}]"), "method: arguments stand under init_args"),
    "init_args no mapping": (method("[{class_path: FedProx, init_args: 3}]"), "method: FedProx.init_args=int: give a"),
    "clas_path": (
        method("[{clas_path: FedProx}]"),
        "method: Method has no 'clas_path'; it takes no arguments",
    ),
    "a method twice": ("method: [FedProx, FedProx]", "method=['fedprox', 'fedprox']: fedprox stands twice"),
    "a callback of Lightning's": (
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        "trainer.callbacks='lightning.pytorch.callbacks.ModelCheckpoint': it is a callback of Lightning's own",
    ),
    # values of another kind
    "trainer 3": ("trainer: 3", "trainer=3: give a mapping of its arguments"),
    "trainer []": ("trainer: []", "trainer=[]: give a mapping of its arguments"),
    "trainer true": ("trainer: true", "trainer=True: give a mapping of its arguments"),
    "model 3": ("model: 3", "model='3': give"),
    "data []": ("data: []", "data='[]': give"),
    "local_steps 1.5": (trainer(local_steps="1.5"), "trainer.local_steps='1.5': give a value of type int or null"),
    "buffers lost": (
        trainer(buffers="lost"),
        "trainer.buffers='lost': give average or keep or local or recalibrate or recalibrate_once",
    ),
    "no file of configs": ("--config=nowhere.yaml", "config="),
    # YAML that is damaged, or of which something would be lost
    "a tab": ("trainer:\n\tmax_rounds: 2", "given.yaml, line 2, column 1: there is a tab"),
    "UTF-16": (raw("trainer: {max_rounds: 2}".encode("utf-16")), "given.yaml, line 1, column 1: the file is UTF-16"),
    "Latin-1": (raw(b"trainer: {name: caf\xe9}"), "given.yaml, line 1, column 20: the byte 0xe9 is no UTF-8"),
    "NUL": (trainer(name="a\0b"), "given.yaml, line 1, column 18: YAML does not allow the character"),
    "two documents": ("trainer: {name: a}\n---\ntrainer: {name: b}", "given.yaml, line 2, column 1: a second document"),
    "a tag of Python": (
        trainer(name="!!python/object/apply:os.system [id]"),
        "given.yaml, line 1, column 17: could not",
    ),
    "deep": (trainer(taps="{a: " * 1000 + "b" + "}" * 1000), "given.yaml, line 1, column 409: there are more than 100"),
    "unclosed": ("trainer: {max_rounds: 2\nmethod: [FedProx]", "given.yaml, line 2, column 7: did not find expected"),
    "a colon in a text": ("trainer: name: a", "given.yaml, line 1, column 14: mapping values are not allowed"),
    "an alias in itself": (trainer(taps="&a {b: *a}"), "given.yaml, line 1, column 17: an alias stands in what it"),
    "an alias bomb": (
        "a: &a [0, 0, 0, 0, 0, 0, 0, 0]\n"
        + "".join(
            f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
            for a, b in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "given.yaml, line 6, column 4: there are more than 200000 values",
    ),
    "a list": ("- trainer", "given.yaml: the file holds no mapping; give"),
    "a text": ("trainer", "given.yaml: the file holds no mapping; give"),
    "nothing": ("# nothing", "given.yaml: the file holds no mapping; give"),
    "a number as a key": (trainer(**{"3": "4"}), "config: 3 is no key; give"),
    "a list as a key": ("? [a]\n: 3", "given.yaml, line 1, column 3: a list or a mapping stands as a key; give"),
    "a section twice": (
        "trainer: {max_rounds: 2}\nmethod: [FedProx]\ntrainer: {name: a}",
        "given.yaml, line 3, column 1: the key trainer stands in line 1 already; keep one",
    ),
    "a key twice on the command line": (
        "--trainer={max_rounds: 2, max_rounds: 3}",
        "trainer: '{max_rounds: 2, max_rounds: 3}', line 1, column 17: the key max_rounds stands in line 1 already",
    ),
    "two merges": (trainer(**{"<<": "{name: a}, <<: {max_rounds: 2}"}), "given.yaml, line 1, column 26: the key <<"),
    "octal": (data(num_clients="010"), "given.yaml, line 1, column 33: 010 is 8 in YAML, of base 8; write 8 or 10"),
    "base 60": (data(num_clients="1:30"), "given.yaml, line 1, column 33: 1:30 is 90 in YAML, of base 60; write 90"),
    "base 60 on the command line": ("--data.num_clients=1:30", "data: '1:30', line 1, column 1: 1:30 is 90 in YAML"),
    # what does not fit together
    "inputs of another size": (encoder("MLP", in_features="60"), "MLP.in_features=60: inputs are 1 x 8 x 8, give 64"),
    "a vector for a CNN": (encoder("MOONCNN", in_channels="1"), "MOONCNN.image_size=32: inputs are 1 x 8 x 8, give"),
    "too few classes": (model(num_classes="3"), "model.num_classes=3: the data has 10 classes, give 10"),
    "a tap nowhere": (trainer(taps="{mine: nowhere}"), "trainer.taps: mine='nowhere': no submodule of ImageClassifier"),
    "a field that is not there": (
        "method: [FedProto]\n" + trainer(taps="{representation: 'encoder:pooled'}"),
        "trainer.taps: representation='encoder:pooled': a Tensor has no pooled; it has no fields",
    ),
    "SCAFFOLD with momentum": ("method: [SCAFFOLD]", "SCAFFOLD with the client optimizer's momentum=0.9: "),
    "half precision": (trainer(precision="16-mixed"), "trainer.precision='16-mixed': a CPU trains"),
    "a strategy": (trainer(strategy="ddp"), "trainer.strategy='ddp': it wraps the model"),
}
