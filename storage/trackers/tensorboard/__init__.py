"""TensorBoard: event files of a whole search, a folder a trial."""
