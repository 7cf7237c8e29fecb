"""Writes and reads checkpoints and other files of a run."""
