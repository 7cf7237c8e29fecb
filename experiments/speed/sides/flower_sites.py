"""Flower's FedAvg at real sites, as short as it gets: each message's process loads model and data, and trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

SITES = 3
client_app, server_app = ClientApp(), ServerApp()


def classifier(name: str) -> Any:
    """The model that our run begins with, too."""
    from lightning.pytorch import seed_everything

    from fl_lightning import models

    seed_everything(0, verbose=False)
    return models.ImageClassifier(getattr(models, name)(), num_classes=10)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    from lightning.fabric import Fabric
    from overhead import BATCH, visit

    from fl_lightning.data import NpyImages

    config, k = message.content["config"], int(context.node_config["number"])
    data = NpyImages(str(config["images"]), num_clients=SITES, batch_size=BATCH)
    data.setup()
    around = SimpleNamespace(data=data, seed=0, server=SimpleNamespace(round=int(config["server-round"]) - 1))
    around.fabric = Fabric(accelerator="cpu", devices=1)
    around.run = SimpleNamespace(loaders=SimpleNamespace(channels_last=False))
    model = classifier(str(config["model"]))
    visit(model, message.content["arrays"].to_torch_state_dict(), around, k)
    metrics = MetricRecord({"num-examples": data.info(k).num_examples})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    given = context.run_config

    def evaluated(round_: int, arrays: ArrayRecord) -> None:
        """The last thing in a round: a line says that it is done."""
        if round_:
            with Path(str(given["done"])).open("a") as file:
                file.write(f"{round_}\n")

    FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES).start(
        grid,
        ArrayRecord(classifier(str(given["model"])).state_dict()),
        num_rounds=int(given["rounds"]),
        train_config=ConfigRecord({"model": given["model"], "images": given["images"]}),
        evaluate_fn=evaluated,
    )
