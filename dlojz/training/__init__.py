"""The parts of the trainer, and the evidence that they leave: all that runs inside a job.

It imports torch when it is loaded, except flags.py, which the launcher reads."""
