"""The outputs of the module's own ``predict_step``; batches are dealt out over the workers."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.data.loaders import ClientLoader, as_client_loader
from fl_lightning.data.partitioned import own_module_of
from fl_lightning.engine.evaluation.evaluator import bound_step
from fl_lightning.engine.evaluation.loop import can_share
from fl_lightning.engine.loaders import flattened
from fl_lightning.errors import require
from fl_lightning.namespaces import is_overridden
from fl_lightning.records.plain import on_cpu
from fl_lightning.seeding import ambient

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run


@torch.no_grad()
def predict(run: Run) -> list[Any]:
    """The outputs of each batch, in order and on the CPU; a list for each loader where there are several.

    Raises:
        UsageError: there is nothing to predict on.
    """
    loaders = loaders_of(run)
    require(bool(loaders), "data", type(run.data).__name__, "it has no predict_dataloader() and no test data")
    with run.resident.evaluating("predict"), run.workers.alone(not can_share(run.client, "predict")):
        with ambient(run.seed, "predict"):
            run.resident.call("on_predict_start")
            run.resident.call("on_predict_epoch_start")
        outputs = [_share(run, loader, index, len(loaders)) for index, loader in enumerate(loaders)]
        run.resident.call("on_predict_epoch_end")
        run.resident.call("on_predict_end")
        ordered = [interleaved(run.workers.gather(one)) for one in outputs]
    run.resident.begin_logging(1.0)
    return ordered if len(ordered) > 1 else ordered[0]


def loaders_of(run: Run) -> list[ClientLoader]:
    """The loaders of ``predict_dataloader``, or without one those of the test data."""
    own = is_overridden("predict_dataloader", run.data)
    key = f"data={type(own_module_of(run.data)).__name__}: predict_dataloader"
    given = flattened(run.data.predict_dataloader(), key) if own else []
    return [as_client_loader(one) for one in given] or run.loaders.evaluation("test")


def interleaved(shares: list[list[Any]]) -> list[Any]:
    """The outputs in the order of the batches, of which worker r of n has r, r + n, r + 2n, ..."""
    absent = object()
    return [one for row in zip_longest(*shares, fillvalue=absent) for one in row if one is not absent]


def _share(run: Run, loader: ClientLoader, index: int, number: int) -> list[Any]:
    """The outputs of this worker's batches of one loader."""
    step, outputs = bound_step(run.client.module, "predict_step", index), []
    which = (index,) if number > 1 else ()
    # a loader that shuffles draws the same order on every worker
    with ambient(run.seed, "predict", index):
        for batch_idx, given in run.loaders.share(loader, run.workers.rank, run.workers.size):
            run.workers.check()
            # each batch has an address of its own, so its random numbers do not depend on the number of workers
            with ambient(run.seed, "predict", index, batch_idx):
                batch = run.loaders.to_device(given, index)
                run.resident.call("on_predict_batch_start", batch, batch_idx, *which)
                run.resident.begin_hook("predict_step")
                with run.fabric.autocast():
                    output = step(batch, batch_idx)
                run.resident.call("on_predict_batch_end", output, batch, batch_idx, *which)
            outputs.append(on_cpu(output))
    return outputs
