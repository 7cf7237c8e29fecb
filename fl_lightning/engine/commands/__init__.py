"""The commands of a trainer: fit, evaluate, predict, replay a visit, and plan a fit (doctor)."""
