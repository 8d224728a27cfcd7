"""What moves the weights: optimizers, schedules, averages of weights, precision."""
