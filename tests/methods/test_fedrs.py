"""FedRS scales the logits of classes that a client does not hold."""

import torch

from fl_lightning.functional import restricted_logits
from fl_lightning.methods import FedRS


def test_fedrs_touches_the_logits_of_missing_classes_only():
    logits, counts = torch.randn(5, 4), torch.tensor([3, 0, 1, 0])
    found = restricted_logits(logits, counts, alpha=0.3)
    assert torch.equal(found[:, [0, 2]], logits[:, [0, 2]])
    torch.testing.assert_close(found[:, [1, 3]], 0.3 * logits[:, [1, 3]])


def test_fedrs_without_bias_is_scaled_products_of_features_and_weights(run):
    seen = []

    class Spy(FedRS):
        name = "fedrs"

        def transform_logits(self, client, logits):
            found = super().transform_logits(client, logits)
            head = client.module.classifier
            present = client.info.label_counts > 0
            seen.append(torch.allclose(found[:, present], (logits - head.bias)[:, present]))
            return found

    run([Spy(use_bias=False)], max_rounds=1)
    assert seen and all(seen)
