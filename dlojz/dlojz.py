"""The trainer of the DLO-JZ workshop: an image classifier, which you will make fast.

By hand:   python -m dlojz.dlojz --test --model resnet18 --image-size 64 -b 32
As a job:  dlojz submit "dlojz/dlojz.py --test --model resnet18 --image-size 64 -b 32"
Flags:     python -m dlojz.dlojz --help

Edit the paragraphs that begin with `# TODO`, one notebook after the other. Read `main` first.
"""

import argparse
import os
from itertools import islice
from types import SimpleNamespace

import torch
import torchvision.transforms.v2

from dlojz import idr_torch
from dlojz.runs import log
from dlojz.training import checkpoint, data, evidence, flags, metrics, models
from dlojz.training.chronometer import Chronometer


def parse_args():
    parser = argparse.ArgumentParser(
        prog="dlojz.py",
        description="Train a torchvision classifier on ImageNet-shaped images, and log how fast.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive, switch = flags.positive, argparse.BooleanOptionalAction
    flag = parser.add_argument_group("what is trained").add_argument
    flag("--model", default="resnet152", help="any classifier of torchvision.models")
    flag("--image-size", type=positive, default=224, metavar="PIXELS", help="side of the input")
    flag("-b", "--batch-size", type=positive, default=32, metavar="N", help="images per process")
    flag("-e", "--epochs", type=positive, default=1, metavar="N", help="passes over the images")
    # TODO 02: a flag --precision

    # TODO 03: a flag --channels-last

    # TODO 04: a flag --profile

    # TODO 06: a flag --accumulate

    flag = parser.add_argument_group("the images and how they are loaded").add_argument
    flag("--data", default=os.environ.get("DLOJZ_DATA") or "data", help="a folder, or 'synthetic'")
    flag("--num-workers", type=int, default=10, metavar="N", help="processes; CPUs at most")
    flag("--persistent-workers", action=switch, default=True, help="keep them between epochs")
    flag("--prefetch-factor", type=positive, default=3, metavar="N", help="batches ready in each")
    flag("--pin-memory", action=switch, default=True, help="page-locked batches, for the GPU")
    flag("--non-blocking", action=switch, default=True, help="do not wait for copies to the GPU")
    flag("--drop-last", action=switch, default=False, help="leave out a last, smaller batch")
    return flags.parse(parser)  # and those that no notebook changes


def build_model(args, num_classes):
    return models.build(args.model, num_classes, args.image_size)


def decode(path):
    # TODO 05: a file becomes a tensor of uint8, [3, height, width]
    return torchvision.datasets.folder.pil_loader(path)


def build_loaders(args):
    # TODO 05: the transforms of tensors; `forward` normalizes uint8, on the device
    transforms = torchvision.transforms
    to_tensor = [transforms.ToTensor(), transforms.Normalize(data.MEAN, data.STD)]

    train = [transforms.RandomResizedCrop(args.image_size), transforms.RandomHorizontalFlip()]
    val = [transforms.Resize(args.image_size * 256 // 224), transforms.CenterCrop(args.image_size)]
    train_set = data.open_set(args, "train", decode, transforms.Compose(train + to_tensor))
    val_set = data.open_set(args, "val", decode, transforms.Compose(val + to_tensor))
    sampler = torch.utils.data.DistributedSampler  # for one process as for many
    # TODO 06c: for each process its share of the images; batches that accumulate
    train_sampler = sampler(train_set, num_replicas=1, rank=0, seed=args.seed)
    val_sampler = sampler(val_set, num_replicas=1, rank=0, shuffle=False)
    train_batches = data.Batches(train_sampler, args.batch_size, args.drop_last)

    val_batches = data.Batches(val_sampler, args.batch_size, drop_last=False)
    return build_loader(args, train_set, train_batches), build_loader(args, val_set, val_batches)


def build_loader(args, dataset, batches):
    num_workers = 0 if dataset.resident else min(args.num_workers, idr_torch.cpus_per_task)
    options = {"num_workers": num_workers}
    if num_workers > 0:  # without workers these two have no meaning, and torch refuses them
        options["persistent_workers"] = args.persistent_workers
        options["prefetch_factor"] = args.prefetch_factor
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=dataset.collate,
        pin_memory=args.pin_memory and torch.cuda.is_available(),
        generator=torch.Generator(),  # its own: a resume must find the default one as it was
        **options,
    )


def forward(training, images, labels, args):
    # TODO 03: the images in channels_last

    # TODO 02: the model and the loss under autocast
    logits = training.model(data.normalize(images))
    loss = training.criterion(logits, labels)

    return logits, loss


def train_step(step, training, images, labels, args, chrono):
    # TODO 06d: does this step begin an update, does it end one?

    chrono.forward()
    logits, loss = forward(training, images, labels, args)

    chrono.backward()
    # TODO 06d: where an update begins; each of its steps counts for its share
    training.optimizer.zero_grad()

    # TODO 02: scale the loss
    loss.backward()

    chrono.update()
    # TODO 06d: the metrics in each step; what follows where an update ends
    logits, loss = logits.detach(), loss.detach()  # frees the graph before any wait
    metrics.update(training.metrics, loss, logits, labels)

    # TODO 02: unscale the gradients before they are clipped, and step through the scaler
    if args.clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), args.clip_norm)
    training.optimizer.step()

    training.scheduler.step()
    return loss


def train_one_epoch(epoch, first_step, loader, training, device, args, chrono):
    training.model.train()
    loader.batch_sampler.set_epoch(epoch, first_step)
    steps = max(0, (args.test_nsteps if args.test else len(loader)) - first_step)
    chrono.next_iter()
    for step, (images, labels) in enumerate(islice(loader, steps), first_step):
        chrono.transfer()
        # TODO 01: copy the batch to the device

        lr = training.scheduler.get_last_lr()[0]
        loss = train_step(step, training, images, labels, args, chrono)
        chrono.next_iter(epoch=epoch, step=step, images=len(images), lr=lr, loss=loss)
        # TODO 04: tell the profiler that a step has ended

        if checkpoint.due(args, step + 1):
            chrono.idle()
            save(training, args, epoch, step + 1)
            chrono.next_iter()
    return metrics.compute_and_reset(training.metrics)


def save(training, args, epoch, step):
    # TODO 06e: one process writes, for all
    checkpoint.save(training, args, epoch, step)


@torch.no_grad()
def evaluate(loader, training, device, args):
    training.model.eval()
    # TODO 06e: all processes judge the model that process 0 saves

    loader.batch_sampler.set_epoch(0)
    for images, labels in islice(loader, args.test_nsteps if args.test else None):
        # TODO 01: copy the batch to the device

        logits, loss = forward(training, images, labels, args)
        metrics.update(training.metrics, loss, logits, labels)
    return metrics.compute_and_reset(training.metrics)


def build_training(args, device, num_classes, total_steps):
    """All that has a state: what a checkpoint holds."""
    # TODO 01: put the model on the device
    model = build_model(args, num_classes)

    # TODO 03: the weights in channels_last

    # TODO 06b: the model in DDP

    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.mom, weight_decay=args.wd)
    training = SimpleNamespace(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps),
    )
    # TODO 01: put the metrics on the device
    training.metrics = metrics.build()

    # TODO 02: training.scaler, a gradient scaler for fp16

    return training


def set_numerics(args):
    torch.manual_seed(args.seed)
    # TODO 02: TF32, unless fp32 is asked for
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # true float32
    torch.backends.cudnn.conv.fp32_precision = "ieee"

    # TODO 03: cuDNN's autotuner

    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)


def main():
    args = parse_args()
    run = log.open_run(args)
    checkpoint.prepare(args, run)
    set_numerics(args)

    # TODO 01: choose the device
    device = torch.device("cpu")

    # TODO 06a: the processes meet, each on its device

    train_loader, val_loader = build_loaders(args)
    # TODO 06d: updates may be rarer than batches
    total_steps = args.epochs * len(train_loader)

    training = build_training(args, device, len(train_loader.dataset.classes), total_steps)
    first_epoch, first_step = checkpoint.load(training, args, device) if args.resume else (0, 0)
    run.setup(device, training, train_loader, val_loader)
    witness = evidence.watch(run, training, train_loader, args)
    chrono = Chronometer(device, run, witness=witness)
    # TODO 04: chrono.profiler, which looks at a few steps

    chrono.start()
    for epoch in range(first_epoch, args.epochs):
        train = train_one_epoch(epoch, first_step, train_loader, training, device, args, chrono)
        chrono.validation()
        val = evaluate(val_loader, training, device, args)
        chrono.idle()
        run.epoch(epoch, train, val)
        first_step = 0
        if args.checkpoint:
            save(training, args, epoch + 1, step=0)
    chrono.stop()
    run.end()
    # TODO 06a: the processes part


if __name__ == "__main__":
    main()
