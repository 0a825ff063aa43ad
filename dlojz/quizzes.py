"""The quizzes of the notebooks: a question, its answers, the right one and the reason.

A notebook shows one with `widgets.quiz("gpu-timer")`; the trainee's answers are kept by
`dlojz.progress`. Adding one: write it here, and call it by its key.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Quiz:
    """A question with one right answer."""

    question: str
    answers: tuple[str, ...]
    right: int  # index into answers
    why: str  # shown once it is answered


QUIZZES = {
    "start-epoch": Quiz(
        "A test run of 50 steps tells the time of one step. What else is needed to know the time "
        "of an epoch?",
        (
            "Nothing: an epoch takes 50 steps",
            "The number of training images and the batch size",
            "The number of epochs",
            "The learning rate",
        ),
        1,
        "An epoch shows each training image once: images / batch size = steps. ImageNet's "
        "1,281,167 images at batch 128 make 10,010 steps.",
    ),
    "start-copy": Quiz(
        "You submit a job, and edit dlojz.py while the job waits in the queue. What runs?",
        (
            "The edited file: Python reads it when the job starts",
            "The file as it was when you submitted",
            "Neither: the job is refused",
        ),
        1,
        "The launcher copies the trainer into the job's folder, and runs the copy. What is kept "
        "beside the figures is what ran.",
    ),
    "start-accelerate": Quiz(
        "A run spends 5 % of each step waiting for data and 95 % computing. You make the loading "
        "of data twice as fast. The step then takes about ...",
        ("50 % less time", "5 % less time", "2.5 % less time", "just as much time"),
        2,
        "Half of 5 % is saved. First look where the time goes, then optimise: this is Amdahl's "
        "law, and the reason to measure before anything else.",
    ),
    "gpu-where": Quiz(
        "The model is on the GPU and the batch is still on the CPU. What happens?",
        (
            "PyTorch copies the batch by itself, slowly",
            "The step runs on the CPU",
            "An error: the input and the weights are not of the same type",
            "The first layer runs on the CPU, the others on the GPU",
        ),
        2,
        "PyTorch never moves a tensor unasked. An operation wants all its tensors on one device; "
        "to PyTorch, a tensor of the GPU is of another type (torch.cuda.FloatTensor).",
    ),
    "gpu-timer": Quiz(
        "You time `loss.backward()` on a GPU with two calls of time.perf_counter(), and nothing "
        "else. What do you measure?",
        (
            "The time that the GPU needs for the backward pass",
            "The time that Python needs to ask for it",
            "The time of the slowest kernel",
        ),
        1,
        "Kernels are launched and not waited for. To time the work, wait for the device, or put "
        "events into its stream: the Chronometer does the latter.",
    ),
    "gpu-memory": Quiz(
        "Which part of the memory grows with the batch size?",
        (
            "The parameters",
            "The gradients of the parameters",
            "The state of the optimizer",
            "The activations that the backward pass needs",
        ),
        3,
        "Parameters, gradients and momentum have the model's size. Each image of the batch adds "
        "its own activations: a straight line over the batch size.",
    ),
    "gpu-list": Quiz(
        "A validation loop forgets torch.no_grad() and appends each `loss` to a list. What stays "
        "in memory after 100 batches?",
        (
            "100 numbers",
            "The activations of the last batch",
            "The activations of all 100 batches",
        ),
        2,
        "Each loss holds the graph that made it, and the graph holds the activations until a "
        "backward pass frees them. `loss.item()` or `loss.detach()` hold neither.",
    ),
}
