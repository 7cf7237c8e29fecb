"""Figures of measurements, for TensorBoard, run folders and reports. This package does not import torch."""
