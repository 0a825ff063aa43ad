"""What runs inside a job: the trainer's parts, and what watches it.

The only room that imports torch as it is loaded."""
