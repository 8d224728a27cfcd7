"""Custom training loops: the objective's own code trains each epoch; hpsearch prunes, stops and resumes the trial."""
