"""The memory of a training step, from the order in which its tensors come and go: numbers only.

`dlojz.estimate.storages` writes that order, without a GPU. Here torch.cuda's caching allocator
gives each tensor its block, as it would on a GPU, and the peak of each phase of the step is kept,
with what it is made of.
"""

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dlojz.course import UserError

PARTS = {
    "parameters": "the weights",
    "gradients": "as the optimizer reads them",
    "unreduced": "whole, before they are exchanged",
    "optimizer": "its state, such as the momentum",
    "buffers": "batch statistics, metrics, the images and labels",
    "casts": "copies of weights in 16 bits, by autocast",
    "activations": "kept for the backward pass",
    "gathered": "weights of all GPUs, while they are all-gathered",
    "communication": "buffers of collectives",
    "temporaries": "of the operation that runs",
    "unsplit": "ends of the allocator's blocks, too small to be used",
    "cublas": "workspaces of matrix products",
}
SENT = {  # in a step by each process, in a ring
    "weights": "all-gathered, for a pass",
    "gradients": "reduce-scattered over the shards, or all-reduced",
    "tokens, gathered": "before the columns",
    "tokens, reduced": "behind the rows",
    "small gradients": "of norms and biases, all-reduced over the tensor's processes",
    "to other stages": "activations to the next one, their gradients to the one before",
}
# Of cuBLAS on an H100 or H200: 32 MiB for the thread of the forward pass, and for the backward's.
CUBLAS_BYTES = 2 * 32 * 2**20
SHARDINGS = ("ddp", "fsdp")
CHECKPOINTINGS = ("off", "blocks")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
TENSOR = (
    "GPUs for each tensor of a vision transformer: columns, then rows, with sequence parallelism; "
    "torchvision's attention is computed as if its heads were divided, too"
)
MODELS = (
    "such as vit_2b, or one of torchvision; timm:NAME; hf:NAME, of a type such as hf:gpt2, a "
    "folder with a config.json, or on the hub; module:function, which returns a torch.nn.Module"
)
OPTIMIZERS = ("adamw", "sgd")
UNITS = {"": 1e9, "GB": 1e9, "GIB": 2**30, "MB": 1e6, "MIB": 2**20}


def add_flags_of_a_plan(add: Callable):
    """Add these flags to the command and to the program behind it, by a parser's add_argument."""
    add("--model", required=True, help=MODELS)
    add("--gpus", type=int, default=1, metavar="N", help="number of GPUs")
    add("--sharding", choices=SHARDINGS, default="ddp", help="ddp: whole on each GPU")
    add("--tensor", type=int, default=1, metavar="N", help=TENSOR)
    add("--stages", type=int, default=1, metavar="N", help="stages of a vision transformer")
    add("--parts", type=int, default=1, metavar="M", help="micro-batches of a pipeline (1F1B)")
    add("-b", "--batch", type=int, default=32, help="images on each GPU, or tensor x stages GPUs")
    add("--checkpointing", choices=CHECKPOINTINGS, default="off", help="recomputation")
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--fits", metavar="80GB", help="find the largest batch for it, and the cheapest means")
    add_flags_of_inputs(add)


def add_flags_of_inputs(add: Callable):
    """Add the flags of a model that is not the course's: what enters it, and its optimizer."""
    add("--image-size", type=int, help="pixels (default: 224, or the model's own)")
    add("--input", metavar="3x224x224", help="one input of a model of your own, as floats")
    add("--tokens", type=int, metavar="N", help="tokens of one input, for a language model")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of your own model")


def shape_of(text: str) -> tuple[int, ...]:
    """Return a shape such as "3x224x224". Raises UserError."""
    words = text.lower().split("x")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--input {text}: expected the sizes of one input, such as 3x224x224")
    return tuple(map(int, words))


def must_be_inputs(args):
    """Raise UserError for flags of one input that are wrong, or more than one."""
    named = [name for name in ("image_size", "input", "tokens") if getattr(args, name) is not None]
    if len(named) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in named)
        raise UserError(f"{flags}: each says what enters the model; expected one of them")
    if args.input is not None:
        shape_of(args.input)


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as "80GB", "79.2 GiB" or "80", which is in GB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = UNITS.get(found[2].upper()) if found else None
    if not unit or not float(found[1]):
        raise UserError(f"{text!r} is not a size of memory: expected one like 80GB or 79.2GiB")
    return round(float(found[1]) * unit)


def must_be_positive(plan):
    """Raise UserError for a size that is not: of a plan, or of a command's arguments."""
    for name in ("gpus", "batch", "image_size", "tokens", "tensor", "stages", "parts"):
        value = getattr(plan, name, None)
        if value is not None and value < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value}: expected a whole number of at least 1")


def must_divide(plan):
    """Raise UserError if a plan's GPUs, copies or parts are not of equal size."""
    each = plan.tensor * plan.stages
    if plan.gpus % each:
        raise UserError(
            f"--gpus {plan.gpus}: expected a multiple of --tensor {plan.tensor} times --stages "
            f"{plan.stages}, such as --gpus {-(-plan.gpus // each) * each}"
        )
    if plan.parts > 1 and plan.stages == 1:
        raise UserError(
            f"--parts {plan.parts}: of a pipeline, so expected --stages of at least 2; else a "
            "smaller --batch, which the trainer may --accumulate"
        )
    if plan.batch % plan.parts:
        more = -(-plan.batch // plan.parts) * plan.parts
        raise UserError(
            f"--parts {plan.parts} don't divide --batch {plan.batch}; expected a multiple, such "
            f"as --batch {more}"
        )


def means(plan: Mapping) -> str:
    """Return a plan in a few words: "bf16, FSDP over 8 GPUs, checkpointing"."""
    found = [plan["precision"]]
    tensor, stages = plan.get("tensor", 1), plan.get("stages", 1)
    replicas = plan["gpus"] // (tensor * stages)
    found += [f"tensors over {tensor} GPUs"] * (tensor > 1)
    found += [f"{stages} stages, {plan.get('parts')} parts"] * (stages > 1)
    if plan["sharding"] == "fsdp":
        copies = f" in {plan['copies']} copies" if plan.get("copies", 1) > 1 else ""
        found.append(f"FSDP over {replicas:,} GPUs{copies}")
    elif replicas > 1:
        found.append(f"DDP on {replicas:,} GPUs")
    if plan["checkpointing"] != "off":
        found.append("checkpointing")
    return ", ".join(found)


# The caching allocator ---------------------------------------------------------------------------

MIB = 2**20


@dataclass(order=True, slots=True)
class Block:
    """A piece of a segment, which is what the allocator asks CUDA for."""

    size: int
    place: int
    small: bool = field(compare=False)
    free: bool = field(compare=False, default=False)
    before: "Block | None" = field(compare=False, default=None, repr=False)
    after: "Block | None" = field(compare=False, default=None, repr=False)


class Allocator:
    """The rules of torch.cuda's caching allocator (of one stream, with its defaults).

    A tensor gets the smallest free block that holds it, or a new segment: of 2 MiB for tensors up
    to 1 MiB, of 20 MiB for those below 10 MiB, else a multiple of 2 MiB. The rest of the block is
    split off; but of a large one only if it is more than 1 MiB: else it counts as allocated.
    """

    def __init__(self):
        self.allocated = self.reserved = 0
        self._free = {True: [], False: []}  # small and large blocks, sorted by size

    def take(self, size: int) -> Block:
        """Return a block for a tensor of this size, a multiple of 512 bytes."""
        small = size <= MIB
        free = self._free[small]
        at = bisect_left(free, Block(size, -1, small))
        block = free.pop(at) if at < len(free) else self._segment(size, small)
        if block.size - size >= (512 if small else MIB + 1):
            rest = Block(block.size - size, block.place + size, small, True, block, block.after)
            if rest.after:
                rest.after.before = rest
            block.size, block.after = size, rest
            insort(free, rest)
        block.free = False
        self.allocated += block.size
        return block

    def _segment(self, size, small):
        whole = (
            2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        )
        self.reserved += whole
        return Block(whole, self.reserved - whole, small)

    def give_back(self, block: Block):
        """Free a block, and join it with its neighbours that are free."""
        self.allocated -= block.size
        free = self._free[block.small]
        for first, second in ((block, block.after), (block.before, block)):
            other = second if first is block else first
            if other and other.free:
                del free[bisect_left(free, other)]
                block = first
                block.size += second.size
                block.after = second.after
                if block.after:
                    block.after.before = block
        block.free = True
        insort(free, block)


# The peaks of a step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """The memory of a moment, in bytes: what it is made of."""

    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())

    def beyond(self, other: "Peak", times: float) -> "Peak":
        """Return this peak after `times` more of the steps that lead from `other` to it."""
        found = {}
        for part in self.parts.keys() | other.parts.keys():
            mine, its = self.parts.get(part, 0), other.parts.get(part, 0)
            more = 0 if part == "unsplit" else times * (mine - its)  # these ends don't add up
            found[part] = mine + more
        return Peak(found)


def peaks(events: Iterable[tuple], parts: Mapping[int, str]) -> dict[str, Peak]:
    """Return the highest peak of each phase.

    events: (number of a storage, its bytes, phase), negative bytes where it is freed; a phase of ""
        is before the first step. parts: of each storage, one of PARTS.
    """
    found = {}
    for (_, size, phase), live, allocator in moments(events, parts):
        if size > 0 and phase and allocator.allocated > found.get(phase, (0,))[0]:
            found[phase] = allocator.allocated, dict(live)
    return {phase: peak_of(allocated, live) for phase, (allocated, live) in found.items()}


def moments(
    events: Iterable[tuple], parts: Mapping[int, str]
) -> Iterator[tuple[tuple, Counter, Allocator]]:
    """Yield each event, and the live bytes of each part and the allocator after it."""
    allocator, blocks, live = Allocator(), {}, Counter()
    for event in events:
        number, size, _ = event
        live[parts[number]] += size
        if size < 0:
            allocator.give_back(blocks.pop(number))
        else:
            blocks[number] = allocator.take(size)
        yield event, live, allocator


def peak_of(allocated: int, live: Mapping[str, int]) -> Peak:
    """Return the memory of a moment, from the allocated bytes and the live bytes of each part."""
    more = {"unsplit": allocated - sum(live.values()), "cublas": CUBLAS_BYTES}
    return Peak({part: size for part, size in {**live, **more}.items() if size})
