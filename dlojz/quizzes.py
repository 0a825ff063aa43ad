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
    "amp-tf32": Quiz(
        "A stock PyTorch 2.11 on an H100, and nobody touched a switch. Which operations on float32 "
        "tensors compute in TF32?",
        (
            "None",
            "The matrix products",
            "The convolutions",
            "Both",
        ),
        2,
        "For cuDNN's convolutions TF32 is on, for matrix products it is off. Our starter switches "
        "both off, so that the whole gain is seen.",
    ),
    "amp-autocast": Quiz(
        "Inside `torch.autocast`, with fp16: what is still computed in float32?",
        (
            "The convolutions",
            "The classifier, a linear layer",
            "The cross-entropy",
            "Nothing: all of it is in fp16",
        ),
        2,
        "The cross-entropy takes exponentials and adds them up. Autocast has a list of such "
        "operations, and gives them float32.",
    ),
    "amp-skip": Quiz(
        "The loss was multiplied by 65,536. Now one gradient of the step is infinite. What does "
        "the scaler do?",
        (
            "It sets this gradient to zero, and updates the weights",
            "It leaves the weights as they are, and halves the scale",
            "It repeats the step with half the scale",
            "It stops the training",
        ),
        1,
        "One infinite gradient would spoil the weights for ever. A step that is left out costs "
        "nothing but its time.",
    ),
    "amp-unscale": Quiz(
        "Somebody clips the gradients to a norm of 1, and forgets to unscale them before. The "
        "scale is 65,536. What becomes of the training?",
        (
            "An error: the gradients are too large",
            "Nothing: the scaler divides by the scale later",
            "It runs as fast as before, and hardly learns",
            "It runs slower, and learns as before",
        ),
        2,
        "The scaled gradients are clipped to 1. Then the scaler divides them by 65,536. Each "
        "update is thousands of times too small, and no figure of speed shows it.",
    ),
    "amp-memory": Quiz(
        "Autocast with Adam: how many bytes does each parameter take between two steps, with its "
        "gradient and its optimizer state?",
        ("8", "10", "12", "16"),
        3,
        "The weight 4, its gradient 4, Adam's two moments 8: all in float32, as without autocast. "
        "The copies in 16 bits come and go within a step.",
    ),
    "amp-pure": Quiz(
        "A weight is 1, in bf16. The optimizer takes 0.001 from it, in each of 500 steps. Where "
        "does it end?",
        ("At 0.5", "At 0.5, give or take a rounding", "At 0.996", "At 1"),
        3,
        "Below 1 the numbers of bf16 are 1/256 apart. An update of less than half of that is "
        "rounded away, each time.",
    ),
    "layout-shape": Quiz(
        "`x` has the shape (32, 3, 224, 224). What is the shape of "
        "`x.to(memory_format=torch.channels_last)`?",
        ("(32, 3, 224, 224)", "(32, 224, 224, 3)", "(3, 32, 224, 224)"),
        0,
        "The indices keep their meaning, so no line of your model changes. Only the order in "
        "memory is new, and `x.stride()` tells it.",
    ),
    "layout-stride": Quiz(
        "The same tensor with its channels next to each other: what is its stride?",
        ("(12, 4, 2, 1)", "(12, 6, 3, 1)", "(12, 1, 6, 3)", "(1, 12, 6, 3)"),
        2,
        "The next channel is the next element: 1. The next column comes after 3 channels, the "
        "next row after 2 columns of 3. The next image is as far as before: 12.",
    ),
    "layout-half": Quiz(
        "You convert the weights to channels_last and forget the images. What happens?",
        (
            "An error: the layouts do not match",
            "All stays as it was: NCHW",
            "The first convolution converts the images, and all that follows is channels_last",
            "Each convolution converts its input, and its output back",
        ),
        2,
        "A convolution of PyTorch works in channels_last as soon as its input or its weights are, "
        "and its output is channels_last too. The figures show what it costs.",
    ),
    "layout-autotuner": Quiz(
        "A training shows its model images of a new size in each step. Then cuDNN's autotuner ...",
        (
            "finds the fastest kernel for each image, and pays off at once",
            "tries kernels for each convolution in each step: slower",
            "does nothing: it is switched off for changing sizes",
        ),
        1,
        "What it found is kept for each shape. A shape that comes only once costs the search and "
        "never pays it back.",
    ),
    "profile-warm-up": Quiz(
        "A schedule has steps that the profiler looks at and throws away. What are they for?",
        (
            "cuDNN's autotuner needs them",
            "When the profiler starts, it slows the step: that step would show the profiler",
            "They make the trace smaller",
        ),
        1,
        "While it starts, the host does something else than training. The autotuner has its own "
        "first steps, which `wait` skips.",
    ),
    "profile-wait": Quiz(
        "In a trace the GPU is idle for a third of each step. Each time it ran out of work, the "
        "host stood in `cudaStreamSynchronize`. What would help?",
        (
            "More workers for the images",
            "A larger batch",
            "Find the line that asks for a number, and ask for it once an epoch",
        ),
        2,
        "The host waited for the GPU, and had nothing prepared when it came back. A larger batch "
        "makes the wait rarer, and hides it: it does not remove it.",
    ),
    "profile-roofline": Quiz(
        "Batch normalization reads a number, does about eight operations, and writes it: one or "
        "two operations for each byte. What makes it faster?",
        (
            "Tensor cores",
            "Fewer bytes: another dtype, or one kernel for it and what comes before and after it",
            "A larger batch",
        ),
        1,
        "Memory is its limit, and no arithmetic. Half the bytes are about half the time. Fusing "
        "layers saves the way to memory and back: that is what notebook 09 is about.",
    ),
    "profile-segments": Quiz(
        "The mean of 200 segments of a list of 20,000 rows: a loop over the segments, or one of "
        "three ways without a loop. How much faster is the best of the three?",
        ("About as fast: all add up the same numbers", "2 to 5 times", "More than 20 times"),
        2,
        "The numbers are few. The loop asks for some thousand operations, each on a few rows, and "
        "reads 200 sizes. What costs is the asking.",
    ),
    "loader-first": Quiz(
        "With 8 workers the first batch comes after 2 s. With 16 workers it comes ...",
        ("after about 1 s", "after about 2 s, or later", "at once"),
        1,
        "One worker makes a whole batch, by itself. More workers make more batches at a time, and "
        "the first of them no sooner.",
    ),
    "loader-bytes": Quiz(
        "A batch of 256 images of 224 pixels goes to the GPU as float32: 154 MB. As bytes it is a "
        "quarter. What else is gained?",
        (
            "Nothing: the copy is hidden behind the computation",
            "Work of the processor: floats are no more made, collated, queued and pinned there",
            "Accuracy",
        ),
        1,
        "The copy to the GPU may be hidden. The cores' time is not: each byte that they do not "
        "move leaves them time to decode.",
    ),
    "ddp-batch": Quiz(
        "A job of 4 processes with `-b 32`. How many images does one update of the weights see?",
        ("8", "32", "128"),
        2,
        "`-b` counts the images of one process. The batch of the update, the global batch, is 4 "
        "times as large. So 4 processes make a quarter of the updates in an epoch, and the best "
        "learning rate may be another one.",
    ),
    "ddp-bytes": Quiz(
        "ResNet-50 has 25.6 million parameters, in fp32. Two processes sum their gradients once a "
        "step. About how much does each of them send?",
        ("25.6 MB", "102 MB", "205 MB"),
        1,
        "4 bytes for each parameter are 102 MB. In a ring each of n processes sends 2 (n - 1) / n "
        "times that: once for two, nearly twice for many. It does not depend on the batch.",
    ),
    "ddp-epoch": Quiz(
        "You forget `set_epoch`. What happens in the second epoch?",
        (
            "DistributedSampler raises an error",
            "All processes see the same images",
            "The images come in the same order as in the first, and in the same batches",
            "The images are no longer shuffled at all",
        ),
        2,
        "The order is drawn from seed + epoch. An epoch that stays 0 draws the same order again. "
        "No error tells you: only the accuracy, perhaps, in the end.",
    ),
    "ddp-sync": Quiz(
        "SyncBatchNorm sends 0.4 MB a step, the gradients are 102 MB. On the GPUs above it adds "
        "more than ten times as much time as all gradients. Why?",
        (
            "Its messages are sent in fp64",
            "In each of the 53 layers the host waits for the GPU, and the GPUs for each other",
            "NCCL is slow for tensors that are not a power of two",
        ),
        1,
        "A layer needs the mean of all processes before it can go on. And PyTorch looks at the "
        "counts on the host: 53 times a step it waits for the GPU, and has then nothing prepared. "
        "Where nobody waits, all messages together, the gradients too, take 4 ms; it adds 27.",
    ),
    "ddp-unused": Quiz(
        "Stochastic depth leaves out some blocks in each step, by chance. Must DDP look for unused "
        "parameters?",
        (
            "Yes: the weights of a block that was left out get no gradient",
            "No: torchvision's multiplies the block by 0, and a gradient of 0 is a gradient",
            "Only if the processes leave out different blocks",
        ),
        1,
        "What counts is the graph: the block was computed, and is part of it. Were the call itself "
        "skipped by an `if`, as with the two heads, the answer would be yes.",
    ),
    "ddp-accumulate": Quiz(
        "Four batches are accumulated before each update, and DDP is left as it is. What is lost?",
        (
            "Nothing: DDP sees that no update follows",
            "The result is wrong: gradients are averaged four times",
            "Time: the gradients are reduced four times, and three of them for nothing",
        ),
        2,
        "DDP reduces after each backward pass, whatever follows. The mean of sums is the sum of "
        "means, so the result is right. `model.require_backward_grad_sync = False` silences it.",
    ),
}
