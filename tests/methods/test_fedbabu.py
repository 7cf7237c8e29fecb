"""FedBABU trains the body beside a head that nobody trains."""

from helpers.runs import assert_same_bits, differs

from fl_lightning.methods import FedBABU, Freeze


def test_fedbabu_is_a_frozen_head_bit_for_bit_and_not_fedavg(run):
    babu, _ = run([FedBABU()])
    assert_same_bits(babu, run([Freeze()])[0])
    assert differs(babu, run()[0])
