"""The memory of a training step, predicted without a GPU."""
