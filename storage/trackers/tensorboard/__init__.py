"""TensorBoard: event files of a study, with one folder per trial."""
