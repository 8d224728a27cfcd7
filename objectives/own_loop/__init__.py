"""Own loops: trainings that an objective runs itself, epoch by epoch, with the guarantees of a trial around them."""
