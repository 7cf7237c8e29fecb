"""The commands on a run: fit, evaluate, predict, replay a visit, and estimate costs."""
