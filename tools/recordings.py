"""The commands that make the recordings of `reference/`, by step: tools/record.py runs them."""

import math
from itertools import product

from dlojz import course

SYNTHETIC = "--image-size 224 --test --data synthetic"
WARM_UP_AND_LAST = 4  # steps of a test run that are not measured
WINDOW_S = 2.4  # the energy counter needs windows of seconds
# Rough speeds in the better layout, for the lengths of windows: the upper two on an H200.
IMAGES_PER_S = {
    "resnet50": {"fp32": 1100, "tf32": 3200, "fp16": 6400, "bf16": 5000},
    "resnet152": {"fp32": 460, "tf32": 1400, "fp16": 2800, "bf16": 2300},
    "vgg19": {"fp32": 500, "tf32": 1500, "fp16": 2900, "bf16": 2900},
    "densenet121": {"fp32": 900, "tf32": 1700, "fp16": 2600, "bf16": 2600},
}
LADDERS = {  # rough speeds on an H200: in fp32, and at the end
    "resnet50": (900, 7000),
    "resnet152": (380, 3200),
    "convnext_tiny": (400, 4500),
    "vit_b_16": (400, 3400),
}
TRACED = ("none", "item", "unpinned", "one-worker", "small-batch", "nchw", "print", "garbage")
UNRECORDED = "03-vgg19-fp32-nhwc-b0256"  # cuDNN's autotuner had not ended after five minutes
MODES = ("default", "reduce-overhead", "max-autotune")  # of torch.compile
# Variants of accuracy.py: formats, mistakes, layouts and batches; decoders and crops; batches,
# schedules and batch normalization; augmentation.
FORMATS_02 = "tf32 fp16 bf16 pure-bf16 no-scaler clipped not-unscaled loss-outside training-only "
FORMATS_02 += "fresh-scaler channels-last accumulation batch-x4 batch-x4-lr"
IMAGES_05 = "torchvision no-antialias no-antialias-train no-flip no-augmentation "
IMAGES_05 += "resized-crop large-crops small-copies"
BATCHES_06 = "accumulation batch-x4 batch-x4-lr batch-x4-warm-up batch-x4-updates "
BATCHES_06 += "batch-x4-lr-updates"
MIXED_07 = "mixup-0.2 mixup cutmix randaugment-1-5 randaugment-2-9"
PROCESSES_06 = "processes sync-batch-norm not-wrapped"
LAYOUTS = {"nchw": "--no-channels-last", "nhwc": "--channels-last"}


def at(name: str) -> str:
    """Return the path of this experiment in the course's folder."""
    return str(course.experiment(name).relative_to(course.course_root()))


def _flags(model, precision, batch):
    return _steps(model, IMAGES_PER_S[model][precision], batch)


def _steps(model, images_per_s, batch):
    """Return flags for a window that is long enough at this speed."""
    images = WINDOW_S * images_per_s
    nsteps = WARM_UP_AND_LAST + max(6, math.ceil(images / batch))
    return f"--model {model} -b {batch} --test-nsteps {nsteps} {SYNTHETIC}"


def _sweep_01():
    for model, batch in product(("resnet50", "resnet152"), (8, 16, 32, 64, 128, 256, 512, 1024)):
        yield f"01-{model}-fp32-b{batch:04d}", f"{_solution('01')} {_flags(model, 'fp32', batch)}"


def _matrix_03():
    for model, precisions in IMAGES_PER_S.items():
        for precision, layout, batch in product(precisions, LAYOUTS, (64, 128, 256, 512, 1024)):
            if precision == "fp32" and batch > 256:
                continue  # the autotuner alone takes minutes
            name = f"03-{model}-{precision}-{layout}-b{batch:04d}"
            how = f"--precision {precision} {LAYOUTS[layout]}"
            if name != UNRECORDED:
                yield name, f"{_solution('03')} {_flags(model, precision, batch)} {how}"


def _traces_04():
    """Yield a trace of each fault, and of the same faults in models that no threshold depends on.

    Traces called "unseen" are from another machine, too (reference/h200). The straggler needs two
    processes.
    """
    flags = {
        "fault": "--model resnet50 -b 128 --precision bf16",
        "held-out": "--model resnet18 -b 256 --precision fp16 --image-size 160",
        "unseen": "--model densenet121 -b 128 --precision tf32 --image-size 192",
    }
    for kind, size in flags.items():
        run = f"{at('faults.py')} {size} --steps 2 --fault"
        for fault in TRACED:
            # Python's functions must be traced to find the line, or the collector.
            stack = " --stack" if fault in ("item", "print", "garbage") else ""
            yield f"04-trace-{kind}-{fault}", f"{run} {fault}{stack}"
        yield f"04-trace-{kind}-straggler-x2", f"{run} straggler"
        yield f"04-trace-{kind}-none-x2", f"{run} none"


def _files_05():
    """Yield training from files and from synthetic data: 153,600 images or more in $DLOJZ_DATA.

    Up to 48 batches are ready before the clock starts, few beside the 600 steps.
    """
    run = "--model resnet50 --image-size 224 -b 256 --precision bf16 --num-workers 16"
    run += " --test --test-nsteps 600"
    for again in (1, 2, 3):
        for what in ("synthetic", "files") if again % 2 else ("files", "synthetic"):
            data = " --data synthetic" if what == "synthetic" else ""
            yield f"05-resnet50-bf16-{what}-{again}", f"{_solution('05')} {run}{data}"
    yield "05-resnet50-bf16-pil", f"{_solution('04')} {run}"


def _scaling_06():
    flags = _flags("resnet50", "bf16", 256)
    for n, again in product((1, 2, 4, 8), (1, 2, 3)):
        name = f"06-resnet50-bf16-x{n}-{again}"
        yield name, f"{_solution('06')} {flags} --precision bf16"
    for again, n in product((1, 2, 3), (1, 2, 4, 8)):  # strong: 256 images in all
        flags = _flags("resnet50", "bf16", 256 // n)
        name = f"06-strong-resnet50-bf16-x{n}-{again}"
        yield name, f"{_solution('06')} {flags} --precision bf16"


def _experiments_06():
    step = "--model resnet50 -b 256 --precision bf16"
    for n in (2, 4, 8):
        yield f"06-all-reduce-x{n}", f"{at('all_reduce.py')} --largest 29"
        yield f"06-ddp-x{n}", f"{at('ddp.py')} {step} --rounds 6 --steps 10 --variants all"
        yield f"06-batchnorm-x{n}", f"{at('batchnorm.py')} --model resnet50"
        yield f"06-unused-x{n}", at("unused.py")


def _ladder():
    """Yield the course's ladder: one training, step by step, on one machine with two GPUs.

    From step 05 on its images are files, of which 27,000 in $DLOJZ_DATA are enough.
    """
    run = "--model resnet50 --image-size 224 -b 256 --test"
    files = f"{run} --precision bf16 --num-workers 14 --test-nsteps 100"
    rungs = {
        "00_start": ("00", f"{run} --data synthetic --test-nsteps 8"),
        "01_gpu": ("01", _steps("resnet50", 900, 256)),
        "02_amp": ("02", f"{_steps('resnet50', 3000, 256)} --precision bf16"),
        "03_channels_last": ("03", f"{_steps('resnet50', 9000, 256)} --precision bf16"),
        "05_dataloader": ("05", files),
        "06_ddp-x2": ("06", files),
        "09_compile-x1": ("09", f"{files} --compile default"),
        "09_compile-x2": ("09", f"{files} --compile default"),
    }
    for rung, (step, flags) in rungs.items():
        yield f"ladder-{rung}", f"{_solution(step)} {flags}"


def _ladder_09():
    """Yield the same training after each step of the course. Each compiles with an empty cache."""
    compiled = "--precision bf16 --compile"
    rungs = {
        "1-fp32": ("01", ""),
        "2-tf32": ("02", "--precision tf32"),
        "3-fp16": ("02", "--precision fp16"),
        "3-bf16": ("02", "--precision bf16"),
        "4-channels-last": ("03", "--precision bf16"),
        "4-channels-last-fp16": ("03", "--precision fp16"),
        **{f"5-{mode}": ("09", f"{compiled} {mode}") for mode in MODES},
        "5-reduce-overhead-fp16": ("09", "--precision fp16 --compile reduce-overhead"),
    }
    for model, (slow, fast) in LADDERS.items():
        for rung, (step, how) in rungs.items():
            flags = _steps(model, slow if step == "01" else fast, 256)
            yield f"09-ladder-{model}-{rung}", f"{_solution(step)} {flags} {how}".rstrip()


def _speeds_09():
    """Yield tuned kernels, other batch sizes, and the supply from files."""
    compiled = "--precision bf16 --compile"
    tuned = "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1"  # tries neighbours of each kernel's tiles
    for precision in ("bf16", "fp16"):
        flags = f"{_steps('resnet50', 6600, 256)} --precision {precision} --compile reduce-overhead"
        yield f"09-tuned-resnet50-{precision}", f"{tuned} {_solution('09')} {flags}"
    for batch in (32, 64, 128, 512):
        for step, how in (("03", "--precision bf16"), ("09", f"{compiled} default")):
            flags = _steps("resnet50", 6600, batch)
            yield f"09-batch-resnet50-{step}-b{batch:04d}", f"{_solution(step)} {flags} {how}"
    for again in (1, 2):  # the variation of one host's speed
        flags = f"--model resnet50 -b 32 --test-nsteps 330 {SYNTHETIC} {compiled} default"
        yield f"09-compiled-resnet50-b0032-{again}", f"{_solution('09')} {flags}"
    # From files, 60,000 or more in $DLOJZ_DATA; few batches are ready as the window opens.
    supply = "--model resnet50 -b 256 --image-size 224 --num-workers 16 --prefetch-factor 1"
    run = f"{_solution('09')} {supply} --test --test-nsteps 200 {compiled} reduce-overhead"
    yield "09-supply-synthetic", f"{run} --data synthetic"
    yield "09-supply-files", run
    yield (
        "09-supply-loader",
        f"{at('loader.py')} --trainer {_solution('09')} " + (f"--workers 8 12 14 16 -- {supply}"),
    )


def _scaling_09():
    flags = f"{_steps('resnet50', 6600, 256)} --precision bf16 --compile default"
    run = f"{_solution('09')} {flags}"
    for n, again in product((1, 2, 4, 8), (1, 2, 3)):
        yield f"09-compiled-resnet50-bf16-x{n}-{again}", run
    variants = "'no communication' DDP both 'both, buckets of 50 MB' 'both, graph not cut'"
    run = f"{at('ddp.py')} --model resnet50 -b 256 --precision bf16 --rounds 6 --steps 10"
    yield "09-ddp-x2", f"{run} --compile default --variants {variants}"
    # On a GPU compiled autograd ends in an error, with torch 2.11.
    others = "'no communication' both 'both, static graph'"
    yield "09-ddp-graphs-x2", f"{run} --compile default --variants {others}"


def _sharding_11():
    for n in (2, 4, 8):
        yield f"11-sharding-x{n}", at("sharding.py")
    yield "11-nodes-x4", f"{at('sharding.py')} --compare nodes"
    yield "11-offload-x2", f"{at('sharding.py')} --compare offload"
    yield "11-sharding-fp32-x2", f"{at('sharding.py')} --precision fp32 -b 16"


def _transformers_11():
    """Yield the transformers on one GPU, up to the limit of its memory, compiled for the speed."""
    sizes = {
        "vit_600m": ((64, "off"), (256, "off"), (64, "blocks"), (512, "blocks")),
        "vit_2b": ((32, "off"), (96, "off"), (256, "off"), (32, "blocks"), (256, "blocks")),
        "vit_6b": ((4, "off"), (16, "blocks"), (128, "blocks")),
    }
    run = f"{_solution('11')} --test-nsteps 16 {SYNTHETIC} --precision bf16 --compile"
    for model, jobs in sizes.items():
        for batch, checkpointing in jobs:
            how = f"--model {model} -b {batch} --checkpointing {checkpointing}"
            yield f"11-{model}-b{batch:04d}-{checkpointing}", f"{run} off {how}"
    for batch, checkpointing in ((64, "off"), (96, "off"), (128, "blocks")):
        how = f"--model vit_2b -b {batch} --checkpointing {checkpointing}"
        yield f"11-vit_2b-b{batch:04d}-{checkpointing}-compiled", f"{run} default {how}"


def _sharded_11():
    """Yield the transformers on two GPUs: whole in each of them, and in shards; one on four."""
    jobs = {
        "vit_600m": ((64, "off", "ddp"), (64, "off", "fsdp")),
        "vit_2b": ((32, "off", "ddp"), (32, "off", "fsdp"), (32, "blocks", "fsdp")),
        "vit_6b": ((64, "off", "fsdp"), (32, "blocks", "fsdp")),
    }
    run = f"{_solution('11')} --test-nsteps 16 {SYNTHETIC} --precision bf16 --compile"
    for model, how in jobs.items():
        for batch, checkpointing, sharding in how:
            flags = f"--model {model} -b {batch} --checkpointing {checkpointing}"
            flags += f" --sharding {sharding}"
            yield f"11-{model}-b{batch:04d}-{checkpointing}-{sharding}-x2", f"{run} off {flags}"
    for model, batch in (("vit_2b", 96), ("vit_2b", 160), ("vit_6b", 64)):
        flags = f"--model {model} -b {batch} --sharding fsdp"
        yield f"11-{model}-b{batch:04d}-off-fsdp-compiled-x2", f"{run} default {flags}"
    for mode, how in {"off": "", "default": "-compiled"}.items():
        flags = "--model vit_6b -b 32 --sharding fsdp"
        yield f"11-vit_6b-b0032-off-fsdp{how}-x4", f"{run} {mode} {flags}"


def _on_a_processor():
    """Yield a processor's runs that texts quote: 1,000 images of 64 px or more in $DLOJZ_DATA."""
    for fault in ("none", "sleep", "garbage --stack"):
        yield (
            f"04-cpu-trace-{fault.split()[0]}",
            f"{at('faults.py')} --model resnet18 -b 8 --image-size 64 --precision fp32 "
            f"--steps 2 --fault {fault}",
        )
    sizes = "--model resnet18 --image-size 64 -b 32"
    # The instructions that oneDNN, which computes convolutions, may use.
    most = {"avx512-bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2"}
    for name, isa in most.items():
        for precision in ("fp32", "bf16"):
            run = f"{_solution('02')} {sizes} --test --data synthetic --test-nsteps 8"
            run = f"ONEDNN_MAX_CPU_ISA={isa} {run} --precision {precision}"
            yield f"02-cpu-{name}-{precision}", run
    for pixels in (64, 128):
        run = f"{at('layouts.py')} --model resnet18 -b 32 --steps 6"
        yield f"03-cpu-layouts-{pixels:03d}", f"{run} --image-size {pixels}"
    yield "04-cpu-segments", "OMP_NUM_THREADS=1 solutions/segments.py --seed 0"
    yield "04-cpu-means", f"OMP_NUM_THREADS=1 {at('segment_mean.py')} --rounds 9"
    yield "10c-cpu-families", f"OMP_NUM_THREADS=1 {at('families.py')}"
    for kept in ("", "no-"):
        run = f"{_solution('05')} {sizes} --test --test-nsteps 12 -e 4 --num-workers 2"
        yield f"05-cpu-{kept}persistent", f"{run} --{kept}persistent-workers"
    seen = "--image-size 32 --classes 8 --images-per-class 100 --epochs 10 --width 96"
    yield "10b-cpu-scales", f"{at('scales.py')} {seen} --every 5"
    tiny = f"{sizes.replace('resnet18', 'vit_tiny')} --test --data synthetic --test-nsteps 12"
    for sharding in ("ddp", "fsdp --checkpointing blocks"):
        run = f"{_solution('11')} {tiny} --precision fp32 --optimizer adamw --lr 0.001"
        yield f"11-cpu-{sharding.split()[0]}-x2", f"{run} --sharding {sharding}"
    # Actions sleep, so four processes need no four cores.
    yield "12-cpu-schedules-x4", f"{at('schedules.py')} --wait 20"
    for name, how in {"splits": "", "ring": "", "divisions": " --batches 4 32"}.items():
        yield f"12-cpu-{name}-x2", f"{at(f'{name}.py')}{how}"
    yield "12-cpu-predicted", f"{at('divisions.py')} --predict cpu/12-cpu-divisions-x2"
    yield "13-cpu-studies", at("studies.py")
    yield "13-cpu-transfer", at("transfer.py")
    rungs = "'00 starter' '03 channels_last' '05 loader' '09 compile' '05, validated once' "
    rungs += "'05, images kept'"
    task = "--images-per-class 60 --val-per-class 20 --judged 50 --seconds 15 --seeds 3"
    yield "14-cpu-bought", f"{at('bought.py')} {task} --rungs {rungs}"


def _solution(step):
    return f"solutions/dlojz_{course.step(step)}.py"


RECORDINGS = {
    "00": {
        "00-resnet50-cpu-b0032": f"{_solution('00')} --model resnet50 -b 32 "
        f"--test-nsteps 12 {SYNTHETIC}",
        "00-ceilings": f"{at('roofline.py')} --ceilings",
        "00-latency": at("latency.py"),
    },
    "01": {
        **dict(_sweep_01()),
        "01-memory": f"{at('memory.py')} --model resnet50 -b 64",
        "01-tensors": f"{at('tensors.py')} -b 256",
        "01-accumulated": f"{at('accumulated.py')} --model resnet50 --image-size 224 -b 256",
        "01-accumulate-4x64": f"{_solution('01')} {_flags('resnet50', 'fp32', 64)} --accumulate 4",
        "01-snapshot": f"{at('snapshot.py')} --model resnet50 -b 64",
    },
    "02": {
        "02-underflow": f"{at('underflow.py')} --model resnet50 -b 256 --steps 20",
        "02-formats": at("formats.py"),
        "02-sizes": f"{at('sizes.py')} --size 8192",
        "02-updates": f"{at('updates.py')} --model resnet50",
        # five seeds; its sizes suit the device, and the clean training is always there
        "02-accuracy": f"{at('accuracy.py')} --seeds 5 --variants {FORMATS_02}",
    },
    "03": {
        "03-layouts": f"{at('layouts.py')} -b 128",
        "03-layouts-fp16": f"{at('layouts.py')} -b 128 --precision fp16",
        "03-multiples": f"{at('multiples.py')} --precision fp16",
        "03-autotuner-off": f"{at('autotuner.py')} --no-autotuner --precision fp16",
        "03-autotuner-on": f"{at('autotuner.py')} --autotuner --precision fp16",
        **dict(_matrix_03()),
    },
    "04": {
        **dict(_traces_04()),
        "04-segments": at("segment_mean.py"),
        "04-host-waits": at("host_waits.py"),
        "04-averages": f"{at('averages.py')} --model resnet50 -b 128 --precision bf16",
    },
    "05": {
        "05-decoders": f"{at('decoders.py')} --images 256 --rounds 6",
        "05-storage": at("storage.py"),
        "05-accuracy": f"{at('accuracy.py')} --seeds 5 --variants {IMAGES_05}",
        **dict(_files_05()),
    },
    "06": {
        "06-accuracy": f"{at('accuracy.py')} --seeds 5 --variants {BATCHES_06}",
        "06-accuracy-x2": f"{at('accuracy.py')} --seeds 5 --variants {PROCESSES_06}",
        "06-accuracy-few-x2": f"{at('accuracy.py')} --seeds 5 --variants {PROCESSES_06} "
        "-b 8 --lr 0.0125 -e 3 --classes 12",  # 4 images in each process
        **dict(_scaling_06()),
        **dict(_experiments_06()),
    },
    "07": {  # the trainings are dealt out among four processes
        "07-costs": f"{at('costs.py')} --images 64 --rounds 6",
        "07-mixing": at("mixing.py"),
        "07-accuracy-short-x4": f"{at('accuracy.py')} --seeds 5 --variants {MIXED_07}",
        "07-accuracy-long-x4": f"{at('accuracy.py')} --seeds 5 --variants {MIXED_07} "
        "--images-per-class 15 -e 150",
    },
    "08": {  # the trainings of the first three are dealt out among their processes
        "08-batches-x4": at("batches.py"),
        "08-lengths-x2": at("lengths.py"),
        "08-variants-x4": at("variants.py"),
        "08-finder": at("finder.py"),
        "08-costs": at("optimizer_costs.py"),
    },
    "09": {  # their sizes suit the device: a GPU's or a processor's
        "09-pointwise": at("pointwise.py"),
        "09-graphs": at("graphs.py"),
        "09-stale": at("stale.py"),
        "09-compile-time": at("compile_time.py"),
        **dict(_ladder_09()),
        **dict(_speeds_09()),
        **dict(_scaling_09()),
    },
    "10": {  # their sizes suit the device: a GPU's or a processor's
        "10-intensity": at("intensity.py"),
        "10-softmax": at("softmax.py"),
        "10-counters": at("counters.py"),  # with ncu installed
        "10-normalize": at("normalize.py"),
        "10-shapes": at("shapes.py"),
        "10-inline": at("inline.py"),  # with nvcc installed
        "10-dispatch": at("dispatch.py"),
    },
    "10b": {  # their sizes suit the device
        "10b-int8": at("int8.py"),  # with torchao installed
        **{f"10b-int8-tuned-{n}": f"{at('int8.py')} --widths 8000" for n in (1, 2, 3)},
        "10b-batches": f"{at('int8.py')} --widths --batches 1 4 16 64 128 256 512 1024",
        "10b-quantized": at("quantized.py"),
        "10b-scales": at("scales.py"),
        "10b-break-even": at("break_even.py"),
    },
    "10c": {
        "10c-attention": at("attention.py"),
        "10c-sequences": at("sequences.py"),
        "10c-products": at("products.py"),
        "10c-families": at("families.py"),
    },
    "11": {  # the first five need no GPU; the others' sizes suit the device
        "11-fits": f"{at('fits.py')} --model vit_6b -b 32",
        "11-alive": f"{at('alive.py')} --model vit_600m -b 32 --precision bf16 --gpus 8 "
        "--ways ddp fsdp blocks",
        "11-meshes": f"{at('fits.py')} --ways blocks --gpus 1024 --copies 1 2 4 8 16 64",
        "11-padding": f"{at('padding.py')} --model vit_l_14",
        "11-predicted": at("predicted.py"),  # of the transformers below, once recorded
        "11-recompute": at("recompute.py"),
        **dict(_transformers_11()),
        **dict(_sharding_11()),
        **dict(_sharded_11()),
        "11-float8": at("float8.py"),  # with torchao installed
    },
    "12": {  # their sizes suit the device
        "12-splits-x2": at("splits.py"),
        "12-divisions-x2": at("divisions.py"),
        "12-schedules-x4": f"{at('schedules.py')} --parts 4 8 16",
        "12-ring-x4": at("ring.py"),
        "12-splits-x4": at("splits.py"),
        "12-divisions-x4": at("divisions.py"),
        "12-predicted": f"{at('divisions.py')} --predict h100/12-divisions-x2",  # needs no GPU
        "12-predicted-four": f"{at('divisions.py')} --predict h100/12-divisions-x4",
        "12-map": at("choices.py"),  # nor does this, but ten minutes
    },
    "13": {  # their sizes suit the device
        "13-studies": f"{at('studies.py')} --minutes 6",
        "13-transfer": at("transfer.py"),
    },
    "14": {  # an H100 with 16 CPUs begins to train after some 12 s
        "14-bought": f"{at('bought.py')} --seconds 30 --rungs "
        "'01 GPU' '02 AMP' '05 loader' '05, validated once'",
    },
    "cpu": dict(_on_a_processor()),
    "ladder": dict(_ladder()),
}
