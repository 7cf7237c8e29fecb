"""The worker processes of a run: launcher, rendezvous, collectives and signals."""
