"""The parts of the trainer, and the evidence that they leave: all that runs inside a job.

The only room that imports torch when it is loaded, but for flags.py, which the launcher reads."""
