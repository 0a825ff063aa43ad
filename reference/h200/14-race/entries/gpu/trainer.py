"""The trainer of the DLO-JZ workshop: an image classifier that you will make fast.

As a job:  dlojz submit "dlojz/dlojz.py --test --model resnet18 --image-size 64 -b 32"
By hand:   python -m dlojz.dlojz --test --model resnet18, or --help

Edit the paragraphs that begin with `# TODO`, notebook by notebook. Read `main` first.
"""

from itertools import islice
from types import SimpleNamespace

import torch
import torchvision.transforms.v2  # and v1, which notebook 05 replaces

from dlojz import idr_torch
from dlojz.runs import log
from dlojz.training import checkpoint, data, flags, imports, metrics, mixing, models
from dlojz.training.chronometer import Chronometer
from dlojz.watch import evidence


def parse_args():
    # TODO 02, TODO 03, TODO 04, TODO 07, TODO 08, TODO 09, TODO 10b, TODO 11a: name its flags
    return flags.parse()


def build_model(args, num_classes):
    # TODO 11b: build a model that will be sharded without values
    return models.build(args.model, num_classes, args.image_size)


def compiled(model, args):
    # TODO 09: compile the model

    return model


def placed(model, args, device):
    # 01: put the model on the device; TODO 11b: or shard its blocks; TODO 11c: recompute them
    model = model.to(device)

    # TODO 03: convert the weights to channels_last

    model = compiled(model, args)
    # TODO 06c: wrap the model in DDP

    return model


def decode(path):
    # TODO 05: decode the file to a tensor of uint8, [3, height, width]
    return torchvision.datasets.folder.pil_loader(path)


def build_transforms(args):
    # TODO 05: use transforms.v2, and no floats: `forward` normalizes uint8 on the device
    train = [
        torchvision.transforms.RandomResizedCrop(args.image_size),
        torchvision.transforms.RandomHorizontalFlip(),
        torchvision.transforms.ToTensor(),
        torchvision.transforms.Normalize(data.MEAN, data.STD),
    ]
    val = [
        torchvision.transforms.Resize(args.image_size * 256 // 224),
        torchvision.transforms.CenterCrop(args.image_size),
        torchvision.transforms.ToTensor(),
        torchvision.transforms.Normalize(data.MEAN, data.STD),
    ]

    # TODO 07b: RandAugment the crops, as PIL images, if --randaugment asks for it

    return [torchvision.transforms.Compose(steps) for steps in (train, val)]


def build_sampler(args, dataset, shuffle):
    # TODO 06b: give each process its share of the images
    processes, rank = 1, 0

    return torch.utils.data.DistributedSampler(dataset, processes, rank, shuffle, args.seed)


def build_loaders(args):
    train_transform, val_transform = build_transforms(args)
    train_set = data.open_set(args, "train", decode, train_transform)
    val_set = data.open_set(args, "val", decode, val_transform)
    train_sampler = build_sampler(args, train_set, shuffle=True)
    train_batches = data.Batches(train_sampler, args.batch_size, args.drop_last, args.accumulate)
    val_batches = data.Batches(build_sampler(args, val_set, shuffle=False), args.batch_size)
    return build_loader(args, train_set, train_batches), build_loader(args, val_set, val_batches)


def build_loader(args, dataset, batches):
    workers = 0 if dataset.resident else min(args.num_workers, idr_torch.cpus_per_task)
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=dataset.collate,
        num_workers=workers,
        persistent_workers=args.persistent_workers and workers > 0,
        prefetch_factor=args.prefetch_factor if workers > 0 else None,
        pin_memory=args.pin_memory and torch.cuda.is_available(),
        generator=torch.Generator(),  # its own, so that a resume finds the default one unchanged
    )


def mixed(images, labels, draws: mixing.Draws, how, classes):
    # TODO 07a: mix each image with its partner, and the labels to targets, [N, classes]
    return images, labels


def forward(training, images, labels, args):
    # TODO 07a: mix the batch, in training only; TODO 03: convert the images to channels_last

    # TODO 02: run the model and the loss under autocast; TODO 10b: normalize by your kernel
    logits = training.model(data.normalize(images))
    loss = training.criterion(logits, labels)

    return logits, loss


def train_step(step, training, images, labels, args, chrono):
    # With --accumulate 4, steps 0 to 3 make one update of the weights, by their mean gradient.
    first, last = step % args.accumulate == 0, (step + 1) % args.accumulate == 0
    # TODO 06c: exchange gradients only in the last step of an update; TODO 11d: also sharded ones

    chrono.forward()
    logits, loss = forward(training, images, labels, args)

    chrono.backward()
    if first:
        training.optimizer.zero_grad()
    # TODO 02: scale the loss
    (loss / args.accumulate).backward()

    chrono.update()
    logits, loss = logits.detach(), loss.detach()  # frees the graph before any wait
    metrics.update(training.metrics, loss, logits, labels)
    if last:
        update(training, args)
    return loss


def update(training, args):
    # TODO 02: unscale the gradients before clipping, and step through the scaler
    if args.clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), args.clip_norm)
    training.optimizer.step()

    training.scheduler.step()


def train_one_epoch(epoch, loader, training, device, args, chrono):
    training.model.train()
    first_step = loader.batch_sampler.first_step  # 0, except after a resume
    steps = max(0, (args.test_nsteps if args.test else len(loader)) - first_step)
    chrono.next_iter()
    for step, (images, labels) in enumerate(islice(loader, steps), first_step):
        chrono.transfer()
        # 01: copy the batch to the device; TODO 07a: and the draws that mix it
        images = images.to(device, non_blocking=args.non_blocking)
        labels = labels.to(device, non_blocking=args.non_blocking)

        lr = training.scheduler.get_last_lr()[0]
        loss = train_step(step, training, images, labels, args, chrono)
        chrono.next_iter(epoch=epoch, step=step, images=len(images), lr=lr, loss=loss)
        # TODO 04: tell the profiler that a step has ended

        if checkpoint.due(args, step + 1):
            chrono.idle()
            save(training, args, epoch, step + 1)
            chrono.next_iter()
    return metrics.compute_and_reset(training.metrics)


@torch.no_grad()
def evaluate(loader, training, device, args):
    training.model.eval()
    # TODO 06d: evaluate the model that process 0 saves, in all processes

    for images, labels in islice(loader, args.test_nsteps if args.test else None):
        # 01: copy the batch to the device
        images = images.to(device, non_blocking=args.non_blocking)
        labels = labels.to(device, non_blocking=args.non_blocking)

        logits, loss = forward(training, images, labels, args)
        metrics.update(training.metrics, loss, logits, labels)
    return metrics.compute_and_reset(training.metrics)


def save(training, args, epoch, step):
    # TODO 06d: gather the states of all processes, and let one write; TODO 11e: each its shards
    states = [checkpoint.own_state(training)]  # generators, metrics, batch statistics
    checkpoint.save(training, states, args, epoch, step)


def build_training(args, device, num_classes, steps):
    """Return all parts that have a state, for a checkpoint to hold."""
    model = placed(build_model(args, num_classes), args, device)
    # TODO 02: let one kernel update all weights; TODO 08c: choose the optimizer and its schedule
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.mom, weight_decay=args.wd)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps, cycle_momentum=False)

    training = SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler)
    training.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    # 01: put the metrics on the device
    training.metrics = metrics.build().to(device)

    # TODO 02: add training.scaler, a gradient scaler for fp16; TODO 07a: and training.classes

    return training


def set_numerics(args):
    torch.manual_seed(args.seed)
    # TODO 02: use TF32, unless fp32 is asked for
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # true float32
    torch.backends.cudnn.conv.fp32_precision = "ieee"

    # TODO 03: turn on cuDNN's autotuner


def set_device():
    # 01: choose the device
    device = idr_torch.device()

    # TODO 06a: connect the processes, each on its device

    return device


def main():
    args = parse_args()
    run = log.open_run(args)
    checkpoint.prepare(args, run)
    set_numerics(args)
    device = set_device()

    train_loader, val_loader = build_loaders(args)
    updates = args.epochs * (len(train_loader) // args.accumulate)
    training = build_training(args, device, len(train_loader.dataset.classes), updates)
    first_epoch, first_step = checkpoint.load(training, args) if args.resume else (0, 0)
    run.setup(device, training, train_loader, val_loader)
    # TODO 08d: try learning rates; the training then begins as if none had been tried

    chrono = Chronometer(device, run, witness=evidence.watch(run, training, train_loader, args))
    # TODO 04: set chrono.profiler, which records a few steps

    chrono.start()
    for epoch in range(first_epoch, args.epochs):
        train_loader.batch_sampler.set_epoch(epoch, first_step if epoch == first_epoch else 0)
        train = train_one_epoch(epoch, train_loader, training, device, args, chrono)
        chrono.validation()
        val = evaluate(val_loader, training, device, args)
        chrono.idle()
        run.epoch(epoch, train, val)
        if args.checkpoint:
            save(training, args, epoch + 1, step=0)
    chrono.stop()
    run.end()
    # TODO 06a: disconnect the processes


if __name__ == "__main__":
    main()
