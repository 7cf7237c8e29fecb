"""DP-FedAvg bounds and noises the mean, accounts for it, and refuses what would pass by."""

import math
from itertools import pairwise

import pytest
import torch
from helpers.runs import assert_same_bits, small_data
from helpers.tiny import variant

from fl_lightning import Method
from fl_lightning.core.sampling import Sampler
from fl_lightning.methods import DPFedAvg
from fl_lightning.models import MLP, ImageClassifier


def plain(width=16):
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [width]))


class States(Method):
    """Notes the global states."""

    def __init__(self):
        self.seen = []

    def on_round_end(self, server, payload):
        self.seen.append({name: value.clone() for name, value in server.state.items()})


def test_without_bound_and_noise_it_is_fedavg_bit_for_bit(run):
    ours = run([DPFedAvg(clip=math.inf, noise=0)], model=plain())[0]
    assert_same_bits(ours, run([], model=plain(), weighting="uniform")[0])
    assert not torch.equal(
        *(state["classifier.weight"] for state in (ours, run([DPFedAvg(0.01, 0)], model=plain())[0]))
    )


@pytest.mark.parametrize("clip", [0.01, 0.3, 1e6])
def test_no_client_sends_more_than_the_bound_and_a_small_change_is_sent_as_it_is(clip):
    method, delta = DPFedAvg(clip, noise=0), {"a": torch.randn(50).double(), "b": torch.randn(3, 4).double()}
    sent = method.transform_client_update(None, delta)
    size, bounded = (torch.cat([v.flatten() for v in d.values()]).norm() for d in (delta, sent))
    assert bounded <= min(clip, size)
    torch.testing.assert_close(sent["a"] / bounded, delta["a"] / size, rtol=1e-6, atol=0)
    assert clip < size or sent is delta


def test_the_noise_of_the_mean_has_the_standard_deviation_of_the_account_and_is_new_in_each_round(run):
    pytest.importorskip("dp_accounting")
    # a bound of nearly nothing leaves the noise alone
    start = plain(256).state_dict()
    watch = States()
    state, trainer = run([DPFedAvg(clip=1e-3, noise=50.0), watch], model=plain(256), max_rounds=2)
    rounds = [start, *watch.seen]
    steps = [torch.cat([(b[n] - a[n]).flatten() for n in a]) for a, b in pairwise(rounds)]
    number = trainer.history[0]["clients"]
    for step in steps:
        assert float(step.std()) * number == pytest.approx(50 * 1e-3, rel=0.02)  # of 19,000 numbers
    assert abs(float(torch.corrcoef(torch.stack(steps))[0, 1])) < 0.05
    assert_same_bits(state, run([DPFedAvg(clip=1e-3, noise=50.0)], model=plain(256), max_rounds=2)[0])


FirstTwo = variant(Sampler, choose=lambda self, rng, round_, num_clients, cohort_size: range(2))


def test_the_account_grows_with_rounds_and_shrinks_with_noise_and_uniform_cohorts(run):
    pytest.importorskip("dp_accounting")

    def spent(noise=2.0, **options):
        history = run([DPFedAvg(noise=noise)], model=plain(), max_rounds=2, **options)[1].history
        return [row["dpfedavg/epsilon"] for row in history]

    whole, sampled, other = spent(), spent(cohort_size=2), spent(cohort_size=2, sampler=FirstTwo())
    assert whole[0] < whole[1] and sampled[1] < whole[1] and other == whole
    assert spent(noise=4.0)[1] < whole[1]
    # two rounds of a Gaussian mechanism are one of half the variance, whose epsilon at most solves
    # delta = Phi(1 / (2 s) - e s) - exp(e) Phi(-1 / (2 s) - e s) (Balle and Wang 2018)
    s, normal = 2.0 / 2 / math.sqrt(2), torch.distributions.Normal(*torch.tensor([0.0, 1.0]).double())
    phi = [float(normal.cdf(torch.tensor(sign / (2 * s) - whole[1] * s).double())) for sign in (1, -1)]
    delta = phi[0] - math.exp(whole[1]) * phi[1]
    assert 1e-7 < delta <= 1e-5


def test_at_real_sites_the_noise_is_not_that_of_the_seed_which_they_know(run):
    pytest.importorskip("dp_accounting")
    data = small_data()
    seeded = [run([DPFedAvg()], model=plain(), data=data)[0] for _ in range(2)]
    assert_same_bits(*seeded)

    class AtSites(DPFedAvg):
        def on_round_start(self, server):
            server.at_sites = True

    other = run([AtSites()], model=plain(), data=data)[0]
    assert not torch.equal(other["classifier.weight"], seeded[0]["classifier.weight"])
