"""Logit adjustment: in training the loss sees the class prior, post hoc the evaluated model loses it."""

import pytest
import torch
from helpers.runs import assert_same_bits, draw, plain_sgd_model, small_data, small_trainer
from helpers.softmax_regression import Softmax, W, X, Y, assert_printed, fit, only_first
from torch.nn.functional import cross_entropy

from fl_lightning.callbacks import Scores
from fl_lightning.data import Dirichlet
from fl_lightning.functional import adjusted_logits
from fl_lightning.methods import LogitAdjustment

COUNTS = torch.tensor([7, 2, 1])
# with batch A, the clients together have these counts
REST = (torch.ones(8, 2), [0] * 6 + [1] * 2)


def test_the_worked_example_of_the_loss_and_of_a_step(tmp_path):
    assert_printed(cross_entropy(adjusted_logits(X["A"] @ W.T, COUNTS), Y["A"]), 1.42610747)
    how = {"added": REST, "cohort_size": 1, "sampler": only_first}
    trainer = fit(tmp_path, [LogitAdjustment(prior="global")], **how)
    numbers = (0.13259891, 0.16924845, -0.00387199, -0.11240553, 0.27127308, 0.04315708)
    assert_printed(trainer.server.state["head.weight"], *numbers)


def test_the_worked_example_post_hoc(tmp_path):
    model = Softmax(bias=True)
    model.head.bias.data = torch.tensor([0.2, -0.05, 0.3], dtype=torch.float64)
    adjustment = LogitAdjustment(when="post_hoc")
    trainer = fit(tmp_path, [adjustment], model=model, added=REST, max_rounds=0)
    adjustment.on_round_end(trainer.server, {})  # of a round that moves nothing
    evaluated = adjustment.evaluated_state(trainer.server, trainer.server.state)
    assert_printed(evaluated["head.bias"], 0.55667494, 1.55943791, 2.60258509)
    assert_same_bits({"head.weight": evaluated["head.weight"]}, {"head.weight": W})


# ---------------------------------------------------------------- laws
LOGITS, TARGETS = draw(6, 3), torch.tensor([0, 1, 2, 0, 1, 0])


def test_equal_counts_and_a_common_factor_change_nothing():
    plain, adjusted = cross_entropy(LOGITS, TARGETS), cross_entropy(adjusted_logits(LOGITS, COUNTS, 0.7), TARGETS)
    equal = cross_entropy(adjusted_logits(LOGITS, torch.tensor([5, 5, 5]), 2.0), TARGETS)
    torch.testing.assert_close(equal, plain, rtol=1e-14, atol=0)
    scaled = cross_entropy(adjusted_logits(LOGITS, 10 * COUNTS, 0.7), TARGETS)
    torch.testing.assert_close(scaled, adjusted, rtol=1e-14, atol=0)
    assert torch.equal(adjusted_logits(LOGITS, torch.tensor([3, 0, 2]), 0.0), LOGITS)


def test_a_missing_class_leaves_the_softmax_and_has_a_floor_if_asked_for():
    counts = torch.tensor([3, 0, 2])
    logits = LOGITS.clone().requires_grad_()
    cross_entropy(adjusted_logits(logits, counts), torch.tensor([0, 2, 2, 0, 0, 0])).backward()
    assert not logits.grad[:, 1].any() and logits.grad[:, ::2].all()
    floored = adjusted_logits(torch.zeros(1, 3, dtype=torch.float64), counts, 2.0, floor=1e-12)
    wanted = (torch.tensor([0.36, 0.0, 0.16], dtype=torch.float64) + 1e-12).log()
    torch.testing.assert_close(floored[0], wanted, rtol=1e-14, atol=0)


def test_a_client_of_one_class_has_loss_0():
    loss = cross_entropy(adjusted_logits(LOGITS, torch.tensor([0, 9, 0])), torch.ones(6).long())
    assert loss.item() == 0


def test_training_with_the_prior_ends_at_the_scores_of_plain_training_post_hoc():
    """With a free vector of logits for each input."""
    shares = draw(5, 3, seed=1).softmax(1)

    def trained(adjust):
        o = torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
        until_exact = {"max_iter": 200, "tolerance_grad": 1e-13, "tolerance_change": 0}
        optimizer = torch.optim.LBFGS([o], **until_exact, line_search_fn="strong_wolfe")

        def loss():
            optimizer.zero_grad()
            value = cross_entropy(adjust(o), shares)
            value.backward()
            return value

        optimizer.step(loss)
        return o.detach()

    with_prior = trained(lambda o: adjusted_logits(o, COUNTS))
    post_hoc = trained(lambda o: o) - adjusted_logits(torch.zeros(1, 3, dtype=torch.float64), COUNTS)
    centered = [scores - scores.mean(1, keepdim=True) for scores in (with_prior, post_hoc)]
    torch.testing.assert_close(*centered, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_where_a_class_is_missing(dtype):
    logits = (3 * LOGITS).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(adjusted_logits(logits, torch.tensor([2, 0, 1])), torch.tensor([0, 2, 2, 0, 0, 0]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all() and not logits.grad[:, 1].any()


# ---------------------------------------------------------------- post hoc
def test_post_hoc_trains_as_fedavg_and_evaluates_the_first_model_as_it_is(run, fedavg):
    state, trainer = run([LogitAdjustment(when="post_hoc")])
    assert_same_bits(state, fedavg["mlp"])
    counts = sum(trainer.data.info(k).label_counts for k in range(4))
    saved = torch.load(trainer.run_dir / "checkpoints/model.ckpt", weights_only=True)["state_dict"]
    gap = state["classifier.bias"] - saved["classifier.bias"]
    torch.testing.assert_close(gap, (counts / counts.sum()).log(), rtol=1e-5, atol=1e-6)
    untrained, plain = (run(methods, max_rounds=0)[1] for methods in ([LogitAdjustment(when="post_hoc")], []))
    assert untrained.evaluate("test") == plain.evaluate("test")


def test_a_class_without_examples_is_not_predicted_and_its_loss_is_finite(tmp_path):
    trainer = fit(tmp_path, [LogitAdjustment(when="post_hoc")], names="AC", model=Softmax(bias=True))
    assert 0 < trainer.metrics["test/loss"] < 10
    bias = torch.load(trainer.run_dir / "checkpoints/model.ckpt", weights_only=True)["state_dict"]["head.bias"]
    assert bias[1] < bias[::2].min() - 1000


def test_the_test_command_does_not_adjust_a_saved_model_again(tmp_path):
    data = small_data(partitioner=Dirichlet(0.1), train_size=200, test_size=100)
    how = {"callbacks": [Scores()], "enable_progress_bar": False}
    trainer = small_trainer(tmp_path, **how)
    trainer.fit(plain_sgd_model(), data, [LogitAdjustment(when="post_hoc")])
    checkpoint, name = trainer.run_dir / "checkpoints/last.ckpt", "scores/class_balanced"
    wanted = trainer.metrics[name]
    other = small_trainer(tmp_path, **how)
    other.test(plain_sgd_model(), data, checkpoint, method=[LogitAdjustment(when="post_hoc")])
    assert other.metrics[name] == wanted


# ---------------------------------------------------------------- refusals
