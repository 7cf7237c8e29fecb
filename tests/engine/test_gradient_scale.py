"""With 16-mixed a step whose gradients overflow is lost; a gradient scaler on the CPU loses steps in the same way."""

from functools import partial

import pytest
import torch
from helpers.errors import refused, warned
from helpers.gradients import scales_gradients
from helpers.runs import assert_same_bits, history, small_trainer
from helpers.tiny import TinyData, TinyModule, clients

from fl_lightning import Method
from fl_lightning.methods import SCAFFOLD
from fl_lightning.utilities.errors import ClientError

pytestmark = pytest.mark.filterwarnings("ignore:.*bfloat16")


class Steep(TinyModule):
    """Its gradients overflow float32 at a scale of 2^127, and not at 2^100."""

    def __init__(self):
        super().__init__(partial(torch.optim.SGD, lr=1e-4))

    def loss(self, batch):
        return 2.0**10 * super().loss(batch)


class Undefined(Steep):
    """Its gradients are nan, though its loss is not."""

    def loss(self, batch):
        return super().loss(batch) + (0 * self.head.bias.sum()).sqrt()


class Watches(Method):
    """Notes the gradients that methods see, and the steps that count."""

    def __init__(self):
        self.seen = []

    def on_client_start(self, client):
        client.scratch(self).seen = []

    def on_before_optimizer_step(self, client, optimizer):
        client.scratch(self).seen.append(all(value.grad.isfinite().all() for value in client.live.values()))

    def on_client_end(self, client):
        client.memory(self)["visit"] = [
            all(client.scratch(self).seen),
            len(client.scratch(self).seen),
            client.num_steps,
        ]


@pytest.fixture(autouse=True)
def scaler(monkeypatch):
    scales_gradients(monkeypatch, 2.0**127)


def fit(folder, methods=(), model=None, ckpt_path=None, sizes=(48, 80), **kwargs):
    torch.manual_seed(0)
    trainer = small_trainer(folder, precision="bf16-mixed", clients_per_step=1, **{"max_rounds": 3, **kwargs})
    trainer.fit(model or Steep(), clients(TinyData(128), *sizes), list(methods), ckpt_path)
    return trainer


def test_steps_are_lost_once_and_not_in_every_round(tmp_path):
    first, *others = fit(tmp_path).history
    assert first["steps/lost"] > 4
    assert not any("steps/lost" in row for row in others)


def test_a_lost_step_counts_for_no_method(tmp_path):
    trainer = fit(tmp_path, [Watches()], max_rounds=1)
    finite, seen, counted = zip(
        *(memory["watches"]["visit"] for memory in trainer.client.memories().values()), strict=True
    )
    assert all(finite)
    assert seen == counted
    assert sum(counted) + trainer.metrics["steps/lost"] == 12 + 20


def test_the_variate_of_scaffold_is_the_mean_of_the_gradients_that_were_applied(tmp_path):
    model = Steep()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = fit(tmp_path, [SCAFFOLD()], model, sizes=(), max_rounds=1)
    taken = 32 - trainer.metrics["steps/lost"]
    for name, variate in trainer.client.memories()[0]["scaffold"]["variate"].items():
        change = trainer.server.state[name].double() - before[name]
        torch.testing.assert_close(variate.double(), -change / (1e-4 * taken), rtol=1e-4, atol=1e-6)


def test_the_scale_does_not_depend_on_the_number_of_workers(tmp_path):
    one, two = (fit(tmp_path, devices=devices, sizes=(16, 80, 32)) for devices in (1, 2))
    assert history(one) == history(two)
    assert_same_bits(one.server.state, two.server.state)


def test_a_run_resumes_with_the_scale_of_its_last_round(tmp_path):
    whole, half = fit(tmp_path / "whole"), fit(tmp_path / "half", max_rounds=1)
    resumed = fit(tmp_path / "half", ckpt_path=half.run_dir / "checkpoints/last.ckpt")
    assert history(resumed) == history(whole)
    assert_same_bits(resumed.server.state, whole.server.state)


def test_a_run_goes_on_from_a_round_in_which_all_steps_are_lost(tmp_path):
    with warned("round 0"):
        first, *_, last = fit(tmp_path, local_steps=2, max_rounds=12).history
    assert first["steps/lost"] == 4
    assert "steps/lost" not in last


def test_gradients_that_overflow_at_any_scale_end_the_run(tmp_path):
    with refused("16-mixed", "trainer.precision=bf16-mixed", kind=ClientError):
        fit(tmp_path, model=Undefined(), local_steps=130)


def test_a_client_that_fails_within_a_step_leaves_the_scaler_to_the_next(tmp_path):
    class Fails(Method):
        def on_before_optimizer_step(self, client, optimizer):
            if client.info.id == 0:
                raise ValueError("no")

    trainer = fit(tmp_path, [Fails()], on_client_error="skip", sizes=(80, 48))
    assert trainer.metrics["clients"] == 1
