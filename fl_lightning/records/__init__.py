"""Run folders, metrics, loggers and partition tables."""
