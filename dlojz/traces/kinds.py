"""The kinds of GPU kernels, copies and operations of torch, by their names."""

import re
from functools import cache
from typing import NamedTuple

COMMUNICATION, MATRIX = "communication", "matrix products and convolutions"
COPIES, NORMALIZATION = "copies", "normalization"
LAYOUT, REST = "changes of layout or dtype", "elementwise and the rest"


class Names(NamedTuple):
    """The names of one maker's software in torch's traces: regular expressions, "" for none."""

    calls: tuple[str, ...]  # the categories of its calls on the host
    waits: str  # calls in which the host waits for the device
    copying: str  # copies: the host waits in the long ones
    blocking: str  # copies that return when they are done: the host waits in all
    allocates: str  # calls that allocate or free memory
    pageable: str  # copies from memory that is not pinned
    kernels: dict[str, str]  # by kind; names shared by all makers are in KINDS
    tensor_cores: str  # parts of the names of matrix kernels that use them
    no_tensor_cores: str


# A trace of another maker's GPU needs a row here, and nothing else.
MAKERS = {
    "NVIDIA": Names(
        calls=("cuda_runtime", "cuda_driver", "runtime"),
        waits=r"cu(da)?(Stream|Device|Event|Ctx)Synchronize",
        copying=r"cudaMemcpy(Async)?$",
        blocking=r"cudaMemcpy$",
        allocates=r"cu(da)?(Malloc|Free|Host|Mem(Alloc|Free|Create|Release|Map|Unmap|Address))",
        pageable=r"Memcpy HtoD \(Pageable",
        kernels={
            COMMUNICATION: r"nccl",
            NORMALIZATION: r"\bbn_[fb]w",
            MATRIX: r"xmma|cudnn::(detail|engines)|scudnn|cutlass|nvjet",
        },
        tensor_cores=r"tensorop|s?16816|s1688|884|bf16|f16f16|tf32|nvjet|wgmma|hmma",
        no_tensor_cores=r"ffma|simt|sgemm|f32f32_f32f32|cf32|<float",
    ),
    # Its categories are CUDA's. No name tells whether the memory was pinned.
    "AMD": Names(
        calls=(),
        waits=r"hip(Stream|Device|Event|Ctx)Synchronize",
        copying=r"hipMemcpy",
        blocking=r"hipMemcpy(WithStream|DtoH|HtoD|DtoD)?$",
        allocates=r"hip(Malloc|Free|Host|Mem(Alloc|Free|Create|Release|Map|Unmap|Address))",
        pageable="",
        kernels={
            COMMUNICATION: r"rccl",
            COPIES: r"^__amd_rocclr_",
            MATRIX: r"Cijk_|attn_[fb]wd|sage_fwd|(paged|unified)_attention|\bbwd_kernel_d[kqv]",
        },
        tensor_cores=r"^Cijk.*_MI\d|xdl|mfma|wmma|_gtcx",
        no_tensor_cores=r"^Cijk(?!.*_MI\d)",
    ),
    # In the runtime of torch 2.5 and earlier, "ur" was "pi". A driver's call is inside of it.
    "Intel": Names(
        calls=("xpu_runtime", "xpu_driver"),
        waits=r"(ur|pi)(QueueFinish|Events?Wait$)|ze\w+Synchronize",
        copying=r"(ur|pi)\w*Enqueue(USM)?Mem(cpy|\w*(Read|Write|Copy))|ze\w*AppendMemoryCopy",
        blocking="",
        allocates=r"(ur|pi)\w*USM\w*(Alloc|Free)|zeMem(Alloc|Free)",
        pageable=r"Memcpy M2D",
        kernels={
            COMMUNICATION: r"xccl|oneccl|\bccl[:_]",
            COPIES: r"^zeCommandListAppendMemory",
            LAYOUT: r"_reorder",
            MATRIX: r"xetla",
        },
        tensor_cores=r"dpas|xmx|systolic",
        no_tensor_cores="",
    ),
}


def _any(field):
    return re.compile("|".join(f"(?:{p})" for m in MAKERS.values() if (p := getattr(m, field))))


def _kernels(kind, shared):
    """Return the pattern of a kind of kernel: shared names, and those of each maker."""
    return "|".join([shared, *(m.kernels[kind] for m in MAKERS.values() if kind in m.kernels)])


def _unfused(pattern):
    """Return a pattern without Triton's fused kernels, except its templates ("tem").

    A fused kernel is named after all its operations, and computes them element by element.
    """
    return rf"^(?!triton_(poi|red|per)_).*?({pattern})"


# The first match counts. An elementwise_kernel that is neither vectorized nor unrolled copies
# between different strides.
KINDS = {
    COMMUNICATION: _kernels(COMMUNICATION, r"gloo:|c10d::|hccl:"),
    COPIES: _kernels(COPIES, r"^Mem(cpy|set)"),
    LAYOUT: _unfused(
        _kernels(
            LAYOUT,
            r"nchwto|nhwcto|(?<!conv_)transpose|converttensor"
            r"|(?<!vectorized_)(?<!unrolled_)elementwise_kernel.*copy"
            r"|\baten::(copy_|clone|contiguous|_to_copy)$",
        )
    ),
    NORMALIZATION: _kernels(NORMALIZATION, r"(batch|layer|group|instance|rms)_?norm|native_norm"),
    MATRIX: _unfused(
        _kernels(
            MATRIX,
            r"conv(?!ert)|gemm|gemv|splitk|winograd|[wd]grad|\b(add|badd)?b?mm\b|matmul"
            r"|contraction|triton_tem|(?<!bi)(?<!tri)linear|(?<!cache_)flash|fmha|sdpa|scaled_dot_product",
        )
    ),
    REST: r"",
}
# cuDNN's helpers around some convolutions, which count as "the rest" in a trace.
AROUND_CONVOLUTIONS = re.compile("cudnn")
# Names of matrix kernels that use tensor cores, which AMD calls matrix cores, and of those that
# do not.
TENSOR_CORES, NO_TENSOR_CORES = _any("tensor_cores"), _any("no_tensor_cores")

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
# Compiled code, as the profiler names it: a region of the forward or the backward pass.
COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunctionBackward$")
# Ranges that read the host's own numbers: a compiler's guards, an optimizer whose rate is a tensor,
# the random crops of a loader without workers.
OWN_READS = re.compile(r"TorchDynamo Cache Lookup$|Optimizer\.step#|enumerate\(DataLoader\)#")
# A collective's name on the host, in the profiler, and on the GPU, as a kernel of NCCL.
COLLECTIVE = re.compile(r"(gloo|nccl|xccl):(\w+)")
NCCL_KERNEL = re.compile(r"nccl(Dev)?Kernel")
# Operations whose result the host needs: a number, or the size of the next tensor.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique_consecutive", "aten::_unique2")
# Calls of a runtime on the host, to be matched from the first letter.
WAITS, COPYING, BLOCKING, ALLOCATES = map(_any, ("waits", "copying", "blocking", "allocates"))
PAGEABLE = _any("pageable")  # copies from memory that is not pinned
TO_HOST = re.compile(r"^Memcpy (DtoH|D2[HMS])")
# In its first ten steps and in every hundredth, DDP waits in its forward pass for the events that
# time the previous step (torch/csrc/distributed/c10d/logger.cpp).
OWN_WAITS = re.compile("(cuda|hip)EventSynchronize"), "DistributedDataParallel.forward"
ASIDE = "dlojz: audit"  # the range of the auditor's work in a profile


@cache
def kind(name: str) -> str:
    """Return the kind of a kernel, a copy or an operation: one of KINDS."""
    return next(k for k, pattern in KINDS.items() if re.search(pattern, name, re.I))


@cache
def on_tensor_cores(name: str) -> bool:
    """Return whether a matrix kernel uses tensor cores, by its name."""
    return bool(TENSOR_CORES.search(name)) and not NO_TENSOR_CORES.search(name)


def tells(name: str) -> str:
    """Return the part of a matrix kernel's name that tells whether it uses tensor cores, or ""."""
    found = NO_TENSOR_CORES.search(name) or TENSOR_CORES.search(name)
    return found[0] if found else ""
