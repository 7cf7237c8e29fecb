"""The sides of ``peers.py``: the same FedAvg in several frameworks, each a process that runs a round when told."""
