"""The engine of a federated run; internal."""
