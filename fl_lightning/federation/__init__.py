"""The clients of a run as sites of a federation, over Flower's deployment engine."""
