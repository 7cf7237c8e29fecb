"""A BERT of Hugging Face's transformers (5.23) on batches that are dictionaries, whole and with peft's LoRA (0.21)."""

from typing import ClassVar

import pytest
import torch
from helpers.lora import effective
from helpers.published import Published, Sets
from helpers.runs import small_trainer
from lightning.pytorch import LightningModule

from fl_lightning import Partitioned
from fl_lightning.callbacks import Callback
from fl_lightning.data import Dirichlet
from fl_lightning.functional import singular_values
from fl_lightning.methods import FedExLoRA, FFALoRA, LoRAProduct

transformers = pytest.importorskip("transformers")


def sentences(number, seed):
    """Sentences of words of their class and of others, padded; a list of dictionaries, as a tokenizer's data set."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        length = int(torch.randint(4, 9, (1,), generator=generator))
        words = 5 + 8 * (index % 3) + torch.randint(0, 8, (length,), generator=generator)
        ids = torch.zeros(8, dtype=torch.int64)
        ids[:length] = words
        found.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(index % 3)})
    return found


def bert():
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


class Classifier(LightningModule):
    """A sequence classifier with a linear warm-up over the steps that the trainer announces."""

    def __init__(self, model, lr=5e-3):
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("val_loss", output.loss)
        self.log("val_accuracy", (output.logits.argmax(-1) == batch["labels"]).float().mean())

    def configure_optimizers(self):
        parameters = [value for value in self.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, 2 * steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TestBert(Published):
    taps: ClassVar = {"representation": "model.bert:pooler_output", "logits": "model.classifier"}
    partitioner = Dirichlet(1.0, min_size=8)
    logged = ("train_loss", "val_loss", "val_accuracy")

    def module(self):
        return Classifier(bert())

    def data(self):
        return Sets(sentences(60, 0), sentences(18, 1))


class TestLoRA(TestBert):
    taps: ClassVar = {
        "representation": "model.base_model.model.bert:pooler_output",
        "logits": "model.base_model.model.classifier",
    }

    def module(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=8, target_modules=["query", "value"])
        return Classifier(peft.get_peft_model(bert(), config), lr=2e-2)

    @pytest.mark.parametrize("method", [FFALoRA, LoRAProduct, FedExLoRA], ids=lambda method: method.__name__)
    def test_methods_for_adapters_find_those_of_peft(self, tmp_path, method):
        """The global model has the mean of the clients' effective weights, exactly or in its best approximation."""
        local = []

        class Watch(Callback):
            def on_client_end(self, trainer, client):
                local.append((client.weight, effective(client.module, client.state())))

        methods, callbacks = [method()], [Watch()]
        trainer = small_trainer(tmp_path, max_rounds=1, precision="64-true", taps=self.taps, callbacks=callbacks)
        data = Partitioned(self.data(), num_clients=3, partitioner=self.partitioner)
        trainer.fit(self.module(), data, methods)
        found = effective(trainer.client.module, trainer.server.state)
        assert len(found) == 4  # query and value of two layers
        for name, weight in found.items():
            mean = sum(n * one[name] for n, one in local) / sum(n for n, _ in local)
            assert not torch.equal(mean, local[0][1][name])
            error = torch.linalg.matrix_norm(weight - mean)
            if method is LoRAProduct:  # the adapters have rank 2
                base = trainer.server.state[name.replace(".default", ".base_layer.weight")]
                error = error - singular_values(mean - base)[2:].square().sum().sqrt()
            assert abs(error) < 1e-10

    def test_only_what_is_trained_travels(self, tmp_path):
        trainer, _, _ = self.run(tmp_path, "fedavg", max_rounds=1)
        trained = sum(v.numel() for v in self.module().parameters() if v.requires_grad)
        assert trainer.metrics["bytes/up"] == self.clients * 4 * trained
