"""The work of a step: its convolutions and matrix products by their sizes, from the profiler.

They are nearly all that a step computes, and counting them is exact where their values are noisy.
Each has its floating-point operations, so that the same work in another form is equal: `mm`,
`addmm` or `bmm`, a product or its transpose. Attention counts as its products.
"""

import math
from collections import Counter, defaultdict

import torch

CPU = torch.autograd.DeviceType.CPU
FORWARD, BACKWARD, AGAIN = "forward", "backward", "again"  # again: recomputed layers
CONVOLUTION, PRODUCT = "convolution", "product"
NODE = "autograd::engine::evaluate_function"  # around the operations of the backward pass
# Ranges of a forward pass alone; the backward pass has products of its own, without these around.
LAYERS = ("aten::linear", "aten::matmul")
ATTENTION = "aten::_scaled_dot_product_"
DTYPES = {
    **{"float": "float32", "double": "float64", "Half": "float16", "BFloat16": "bfloat16"},
    **{"long int": "int64", "long": "int64", "int": "int32", "unsigned char": "uint8"},
}


def dtype(name: str) -> str:
    """Return torch's name of a profiler's dtype: float is float32, c10::Half float16."""
    return DTYPES.get(name.removeprefix("c10::"), name)


def counted(events) -> list[dict]:
    """Return the convolutions and products of a step: {when, kind, of, dtype, flop, count}.

    of: the sizes, in words; flop: the operations of one of them.
    """
    found, threads = Counter(), defaultdict(list)
    for event in events:
        name = event.name()
        if (name in COUNTED or name.startswith((NODE, ATTENTION))) and event.device_type() == CPU:
            threads[event.start_thread_id()].append(event)
    for thread in threads.values():
        found.update(_of_thread(thread))
    names = ("when", "kind", "of", "dtype", "flop")
    return [dict(zip(names, key, strict=True)) | {"count": n} for key, n in found.items()]


def _of_thread(events):
    """Yield (when, kind, of, dtype, flop) of each operation that no other one calls."""
    ends = dict.fromkeys(("node", "layer", "work"), -1)  # of the range entered last
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        name, begin = event.name(), event.start_ns()
        end = begin + event.duration_ns()
        if name.startswith(NODE):
            ends["node"] = max(ends["node"], end)
        elif name in LAYERS:
            ends["layer"] = max(ends["layer"], end)
        elif begin >= ends["work"] and (found := _work(name, event)):
            ends["work"] = end
            when = BACKWARD if begin < ends["node"] else FORWARD
            if when == BACKWARD and (begin < ends["layer"] or _is_of_a_forward_pass(name)):
                when = AGAIN
            computed = dtype(event.dtypes()[OPERANDS.get(name, 0)])
            for kind, of, flop in found:
                yield when, kind, of, computed, flop


def _is_of_a_forward_pass(name):
    return name == "aten::convolution" or (name.startswith(ATTENTION) and "backward" not in name)


# The index of a product's first operand among the arguments.
OPERANDS = {
    **{"aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::_int_mm": 0, "aten::_scaled_mm": 0},
    **{"aten::addmm": 1, "aten::baddbmm": 1, "aten::addmv": 1, "aten::_addmm_activation": 1},
}
# Attention has several names.
COUNTED = {*LAYERS, *OPERANDS, "aten::convolution", "aten::convolution_backward"}


def _work(name, event) -> list[tuple[str, str, int]]:
    """Return (kind, sizes in words, floating-point operations) of each computation of a call."""
    if name in OPERANDS:
        place = OPERANDS[name]
        return [product(*event.shapes()[place : place + 2])]
    if name == "aten::convolution":
        return [convolution(event.shapes(), event.concrete_inputs())]
    if name == "aten::convolution_backward":
        return convolution_backward(event.shapes(), event.concrete_inputs())
    if name.startswith(ATTENTION) and not name.endswith("attention_math"):
        return [attention(event.shapes(), backward="backward" in name)]
    return []


def product(a, b) -> tuple[str, str, int]:
    """Return the work of a matrix product, or of a batch of them.

    A product and its transpose have the same words, and so have the products of a backward pass.
    """
    batch = a[0] if len(a) == 3 else 1
    rows, inner, columns = a[-2], a[-1], (b[-1] if len(b) > 1 else 1)
    of = "x".join(map(str, sorted((rows, inner, columns), reverse=True)))
    return PRODUCT, f"{batch} of {of}" if batch > 1 else of, 2 * batch * rows * inner * columns


def convolution(shapes, inputs) -> tuple[str, str, int]:
    """Return the work of a convolution, from its arguments."""
    image, weight = shapes[:2]
    stride, padding, dilation, transposed = inputs[3:7]
    if transposed:  # each pixel that enters is multiplied by a whole kernel
        places = image[2:]
    else:
        sizes = (_spread(values, len(image) - 2) for values in (stride, padding, dilation))
        places = [
            (size + 2 * pad - hop * (width - 1) - 1) // step + 1
            for size, width, step, pad, hop in zip(image[2:], weight[2:], *sizes, strict=True)
        ]
    return CONVOLUTION, _sizes(image, weight), _flop(image[0], places, weight)


def convolution_backward(shapes, inputs) -> list[tuple[str, str, int]]:
    """Return the work of each gradient in a convolution's backward pass."""
    gradient, image, weight = shapes[:3]
    transposed, wanted = inputs[7], inputs[10]
    places = image[2:] if transposed else gradient[2:]
    flop = _flop(image[0], places, weight)
    of = _sizes(image, weight)
    named = zip(("images", "weights"), wanted, strict=False)  # and the biases: no convolution
    return [(CONVOLUTION, f"{of} for the {name}", flop) for name, yes in named if yes]


def _sizes(image, weight):
    return " by ".join("x".join(map(str, shape)) for shape in (image, weight))


def _flop(images, places, weight):
    return 2 * images * math.prod(places) * math.prod(weight)


def _spread(values, count):
    return list(values) * count if len(values) == 1 else list(values)


def attention(shapes, backward: bool) -> tuple[str, str, int]:
    """Return the work of attention's two products, or of the four of its backward pass."""
    query, key = shapes[1:3] if backward else shapes[:2]
    *heads, length, channels = query
    flop = 2 * 2 * math.prod(heads) * length * key[-2] * channels
    of = f"attention {math.prod(heads)} of {length}x{key[-2]}x{channels}"
    return PRODUCT, of, 2 * flop if backward else flop
