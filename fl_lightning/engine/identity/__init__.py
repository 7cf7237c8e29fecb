"""What a run is, as plain values, and how two of them differ."""
