"""Figures of what callbacks measure, for TensorBoard, run folders and reports. Nothing here imports torch."""
