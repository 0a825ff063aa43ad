"""The trainer of the DLO-JZ workshop: an image classifier, which you will make fast.

By hand:   python -m dlojz.dlojz --test --model resnet18 --image-size 64 -b 32
As a job:  dlojz submit "dlojz/dlojz.py --test --model resnet18 --image-size 64 -b 32"
Flags:     python -m dlojz.dlojz --help

Edit the paragraphs that begin with `# TODO`, one notebook after the other. Read `main` first.
"""

import argparse
import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
import torchmetrics
import torchvision
from torchvision import transforms

from dlojz import checkpoint, data, idr_torch, log
from dlojz.chronometer import Chronometer


def parse_args():
    parser = argparse.ArgumentParser(
        prog="dlojz.py",
        description="Train a torchvision classifier on ImageNet-shaped images, and log how fast.",
        epilog="example: dlojz.py --test --model resnet50 -b 128 --data synthetic",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    switch = argparse.BooleanOptionalAction
    flag = parser.add_argument_group("what is trained").add_argument
    flag("--model", default="resnet152", help="any classifier of torchvision.models")
    flag("--image-size", type=positive, default=224, metavar="PIXELS", help="side of the input")
    flag("-b", "--batch-size", type=positive, default=32, metavar="N", help="images per process")
    flag("-e", "--epochs", type=positive, default=1, metavar="N", help="passes over the images")
    flag("--lr", type=float, default=0.1, help="highest learning rate of the one-cycle schedule")
    flag("--wd", type=float, default=5e-4, help="weight decay")
    flag("--mom", type=float, default=0.9, help="momentum")
    flag("--clip-norm", type=float, default=0.0, help="largest norm of the gradients; 0: any")
    flag("--seed", type=int, default=0, help="of the weights, the order and the crops")
    flag("--deterministic", action="store_true", help="the same bits in every run; slower")
    flag = parser.add_argument_group("a short run, to see how fast it is").add_argument
    flag("--test", action="store_true", help="a few steps of each epoch, and no checkpoint")
    flag("--test-nsteps", type=positive, default=50, metavar="N", help="how many")
    flag = parser.add_argument_group("the images and how they are loaded").add_argument
    flag("--data", default=os.environ.get("DLOJZ_DATA") or "data", help="a folder, or 'synthetic'")
    flag("--num-workers", type=int, default=10, metavar="N", help="processes; CPUs at most")
    flag("--persistent-workers", action=switch, default=True, help="keep them between epochs")
    flag("--prefetch-factor", type=positive, default=3, metavar="N", help="batches ready in each")
    flag("--pin-memory", action=switch, default=True, help="page-locked batches, for the GPU")
    flag("--non-blocking", action=switch, default=True, help="do not wait for copies to the GPU")
    flag("--drop-last", action=switch, default=False, help="leave out a last, smaller batch")
    flag = parser.add_argument_group("stopping and going on").add_argument
    flag("--checkpoint", type=Path, metavar="FILE", help="None: in the run's folder, but for tests")
    flag("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: at epoch ends only")
    flag("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")
    return check_args(parser, parser.parse_args())


def check_args(parser, args):
    if args.model not in torchvision.models.list_models(torchvision.models):
        parser.error(f"--model {args.model}: not in torchvision.models; try resnet18 or resnet50")
    if args.checkpoint and args.checkpoint.exists() and args.checkpoint != args.resume:
        parser.error(f"--checkpoint {args.checkpoint} exists: name another, or --resume from it")
    if args.num_workers == 0 and idr_torch.is_master:
        print("note: without workers, --persistent-workers and --prefetch-factor mean nothing")
    return args


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return int(text)


def build_model(args, num_classes):
    options = {"image_size": args.image_size} if args.model.startswith("vit_") else {}
    if args.model in ("googlenet", "inception_v3"):
        options = {"aux_logits": False}  # one loss, as for all others
    return torchvision.models.get_model(args.model, num_classes=num_classes, **options)


def build_loaders(args):
    to_tensor = [transforms.ToTensor(), transforms.Normalize(data.MEAN, data.STD)]
    size = args.image_size
    crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    center = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    train_set = data.open_set(args, "train", transforms.Compose(crop + to_tensor))
    val_set = data.open_set(args, "val", transforms.Compose(center + to_tensor))

    sampler = torch.utils.data.DistributedSampler  # for one process as for many
    train_sampler = sampler(train_set, num_replicas=1, rank=0, seed=args.seed)
    val_sampler = sampler(val_set, num_replicas=1, rank=0, shuffle=False)

    return (
        build_loader(args, train_set, data.Batches(train_sampler, args.batch_size, args.drop_last)),
        build_loader(args, val_set, data.Batches(val_sampler, args.batch_size, drop_last=False)),
    )


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


def build_metrics(num_classes):
    # Checks of values (NaN, range of labels) are off: each would make the host wait for the GPU.
    # MeanMetric then ignores weights, so it is given a batch's loss once for each image.
    loss = torchmetrics.MeanMetric(nan_strategy="disable")
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=num_classes, validate_args=False)
    loss.persistent(True)  # a checkpoint in the middle of an epoch holds their sums
    accuracy.persistent(True)
    return torch.nn.ModuleDict({"loss": loss, "accuracy": accuracy})


def train_step(training, images, labels, args, chrono):
    chrono.forward()
    logits = training.model(data.normalize(images))
    loss = training.criterion(logits, labels)

    chrono.backward()
    training.optimizer.zero_grad()
    loss.backward()

    chrono.update()
    if args.clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), args.clip_norm)
    training.optimizer.step()
    training.scheduler.step()
    return logits.detach(), loss.detach()


def train_one_epoch(epoch, first_step, loader, training, device, args, chrono):
    training.model.train()
    loader.batch_sampler.set_epoch(epoch, first_step)
    steps = max(0, (args.test_nsteps if args.test else len(loader)) - first_step)
    chrono.next_iter()
    for step, (images, labels) in enumerate(islice(loader, steps), first_step):
        chrono.transfer()
        # TODO 01: copy the batch to the device

        lr = training.scheduler.get_last_lr()[0]
        logits, loss = train_step(training, images, labels, args, chrono)
        training.metrics["loss"].update(loss.expand(len(images)))
        training.metrics["accuracy"].update(logits, labels)
        chrono.next_iter(epoch=epoch, step=step, images=len(images), lr=lr, loss=loss)
        if checkpoint.due(args, step + 1):
            chrono.idle()
            checkpoint.save(training, args, epoch, step + 1)
            chrono.next_iter()
    return compute_and_reset(training.metrics)


@torch.no_grad()
def evaluate(loader, training, device, args):
    training.model.eval()
    loader.batch_sampler.set_epoch(0)
    steps = args.test_nsteps if args.test else len(loader)
    for images, labels in islice(loader, steps):
        # TODO 01: copy the batch to the device

        logits = training.model(data.normalize(images))
        loss = training.criterion(logits, labels)
        training.metrics["loss"].update(loss.expand(len(images)))
        training.metrics["accuracy"].update(logits, labels)
    return compute_and_reset(training.metrics)


def compute_and_reset(metrics):
    values = {name: metric.compute().item() for name, metric in metrics.items()}  # synchronizes
    for metric in metrics.values():
        metric.reset()
    return values


def build_training(args, device, num_classes, total_steps):
    """All that has a state: what a checkpoint holds."""
    # TODO 01: put the model on the device
    model = build_model(args, num_classes)

    # TODO 01: put the metrics on the device
    metrics = build_metrics(num_classes)

    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.mom, weight_decay=args.wd)
    return SimpleNamespace(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps),
        metrics=metrics,
    )


def set_numerics(args):
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # true float32, no TF32
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)


def main():
    args = parse_args()
    run = log.open_run(args)
    if args.checkpoint is None and not args.test:
        args.checkpoint = run.folder / "checkpoint.pt"
    checkpoint.listen()
    set_numerics(args)

    # TODO 01: choose the device
    device = torch.device("cpu")

    train_loader, val_loader = build_loaders(args)
    num_classes, total_steps = len(train_loader.dataset.classes), args.epochs * len(train_loader)
    training = build_training(args, device, num_classes, total_steps)
    first_epoch, first_step = checkpoint.load(training, args, device) if args.resume else (0, 0)

    run.setup(device, training, train_loader, val_loader)
    chrono = Chronometer(device, run)
    chrono.start()
    for epoch in range(first_epoch, args.epochs):
        train = train_one_epoch(epoch, first_step, train_loader, training, device, args, chrono)
        chrono.validation()
        val = evaluate(val_loader, training, device, args)
        chrono.idle()
        run.epoch(epoch, train, val)
        first_step = 0
        if args.checkpoint:
            checkpoint.save(training, args, epoch + 1, step=0)
    chrono.stop()
    run.end()


if __name__ == "__main__":
    main()
