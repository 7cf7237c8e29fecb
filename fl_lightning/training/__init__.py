"""Local training of one client: steps, optimizers, schedules and device loaders."""
