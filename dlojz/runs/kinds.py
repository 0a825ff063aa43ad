"""The kinds of GPU kernels, copies and operations of torch, told by their names."""

import re
from functools import cache

COMMUNICATION, MATRIX = "communication", "matrix products and convolutions"
COPIES, NORMALIZATION = "copies", "normalization"
LAYOUT, REST = "changes of layout or dtype", "elementwise and the rest"

# The first match counts. An elementwise_kernel that is neither vectorized nor unrolled copies
# between different strides.
KINDS = {
    COMMUNICATION: r"nccl|gloo:|c10d::",
    COPIES: r"^Mem(cpy|set)",
    LAYOUT: r"nchwto|nhwcto|transpose|converttensor"
    r"|(?<!vectorized_)(?<!unrolled_)elementwise_kernel.*copy"
    r"|^aten::(copy_|clone|contiguous|_to_copy)$",
    NORMALIZATION: r"batch_?norm|\bbn_[fb]w|layer_?norm|native_norm",
    MATRIX: r"conv(?!ert)|gemm|gemv|xmma|cudnn::(detail|engines)|scudnn"
    r"|cutlass|nvjet|splitk|winograd|[wd]grad|\b(add|badd)?b?mm\b|matmul|linear"
    r"|flash|fmha|sdpa|scaled_dot_product",
    REST: r"",
}
# cuDNN's helpers around some convolutions, which count as "the rest" in a trace.
AROUND_CONVOLUTIONS = re.compile("cudnn")
# Names of matrix kernels that use tensor cores, and of those that do not.
TENSOR_CORES = re.compile(r"tensorop|s?16816|s1688|884|bf16|f16f16|tf32|nvjet|wgmma|hmma")
NO_TENSOR_CORES = re.compile(r"ffma|simt|sgemm|f32f32_f32f32|cf32|<float")

# The operations that tensor cores can compute, as torch's dispatcher names them.
MATRIX_OPS = {
    "aten::convolution": "convolution",
    "aten::convolution_backward": "convolution backward",
    "aten::addmm": "matrix product",
    "aten::mm": "matrix product",
    "aten::bmm": "matrix product",
    "aten::baddbmm": "matrix product",
}
# A fused optimizer: one call for all weights of a device.
FUSED = re.compile(r"aten::_fused_(sgd|adam|adamw|adagrad)_$")
# What torch.compile made, as the profiler names it: a region of the forward or the backward pass.
COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunctionBackward$")
# What reads numbers of the host itself: a compiler's guards, an optimizer whose rate is a tensor,
# the random crops of a loader without workers.
OWN_READS = re.compile(r"TorchDynamo Cache Lookup$|Optimizer\.step#|enumerate\(DataLoader\)#")
# A collective's name on the host, in the profiler, and on the GPU, as a kernel of NCCL.
COLLECTIVE = re.compile(r"(gloo|nccl):(\w+)")
NCCL_KERNEL = re.compile(r"nccl(Dev)?Kernel")
# Operations whose result the host must know: a number, or the size of the next tensor.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique_consecutive", "aten::_unique2")
# CUDA calls in which the host waits for the device; a copy counts only if it takes long.
WAITS = re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize")
# In its first ten steps and in every hundredth, DDP waits in its forward pass for the events by
# which it times the step before (torch/csrc/distributed/c10d/logger.cpp).
OWN_WAITS = "cudaEventSynchronize", "DistributedDataParallel.forward"
ASIDE = "dlojz: audit"  # a range in the profile of what the auditor does


@cache
def kind(name: str) -> str:
    """Return the kind of a kernel, a copy or an operation: one of KINDS."""
    return next(k for k, pattern in KINDS.items() if re.search(pattern, name, re.I))


@cache
def on_tensor_cores(name: str) -> bool:
    """Return whether the name of a matrix kernel says that tensor cores compute it."""
    return bool(TENSOR_CORES.search(name)) and not NO_TENSOR_CORES.search(name)


def tells(name: str) -> str:
    """Return the part of a matrix kernel's name that says so, either way; "" if none does."""
    found = NO_TENSOR_CORES.search(name) or TENSOR_CORES.search(name)
    return found[0] if found else ""
