"""What is asked of a run: to fit, to evaluate, to predict, to repeat a visit, to say what it would cost."""
