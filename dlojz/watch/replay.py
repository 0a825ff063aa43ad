"""The replay of some updates of a run with the solution: `replay.py SOLUTION MINE FLAGS...`

A check runs it. MINE is the folder of an audited run (see `dlojz.watch.auditor`), SOLUTION that of
the solution's own run, whose copy of the trainer is imported; both ran with FLAGS.

An update is judged in links, because only the model's one is noisy:

images      some pixels of every step, and the number of images with a gradient
outputs     the logits: the solution's, from the same weights and its own images
criterion   the gradient of the logits: that of the solution's criterion for the trainee's logits
last        the direction of the last bias's gradient: the sum of those of the logits
gradients   as they enter the optimizer: the solution's, from the same weights and its own images
optimizer   the solution's, fed with the trainee's gradients: the weights and momenta that follow
buffers     of batch normalization, after the step
touched     weights and momenta, as an update begins: those that the last one left
validation  pixels and labels of each batch; the buffers: those of process 0

Outputs, gradients and buffers are judged in float32 alone: in 16 bits rounding hides what the
trainer does. The noise of a link is the solution's own, with weights that are off by a rounding
error. Such an error can turn a ReLU on or off, and the gradients jump: where they are far
off, the solution repeats the update with other errors, and the nearest of its gradients count. Only
tensors are taken from the trainee: learning rates, settings and the schedule are the solution's.
Every number goes into the log; `dlojz.check.audit` judges them.
"""

import math
import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import torch

from dlojz import idr_torch
from dlojz.runs import log, records
from dlojz.training import distributed
from dlojz.training.sharding import own
from dlojz.watch import distances, store, watched
from dlojz.watch.solved import Solution, imported, in_each_process

NOISY = 3  # updates whose noise is measured
USUAL = 1e-4  # the noise of float32's gradients without a kink: ShuffleNet, on a processor
AGAIN = 6  # repetitions of an update whose gradients are far off
ROUNDING = 2.0**-24  # of float32: half the distance between neighbours near 1


def main():
    """Replay the run, and log the results."""
    solution, mine, *flags = sys.argv[1:]
    file = Path(solution, "trainer.py")
    trainer = imported(file)
    sys.argv = [str(file), *flags]
    args = trainer.parse_args()
    run = log.open_run(args)
    trainer.set_numerics(args)
    if getattr(args, "compile", "off") != "off":  # a few steps are not worth it
        torch.compiler.set_stance("force_eager")
    replay = Replay(trainer, args, trainer.set_device())
    distributed.keep_group()
    run.setup(replay.device, replay.training, *replay.loaders)
    pair = [torch.load(watched.watched_file(f, idr_torch.rank)) for f in (mine, solution)]
    _all_the_same(pair[0].kept)
    updates, touched, last = [], [], None
    for file in map(Path, pair[0].files):
        state = store.load(file)
        if last:
            # An update that was not kept, as one of a model in evaluation mode, is no touch.
            follows = state["facts"].update == last[1]["facts"].update + 1
            touched += store.touched(last[1], state) if follows else []
            store.drop(last[0])
        if not _had_to_skip(state):
            noisy = sum(u.gradients_noise is not None for u in updates) < NOISY
            updates.append(replay.update(state, pair[0].steps, noisy))
        last = file, state
    if last:
        store.drop(last[0])
    every = replace(
        distances.every_step(replay, *pair),
        touched=touched,
        validation=replay.validation(*pair),
    )
    run.evidence(records.Replay(updates, every))
    run.end()
    distributed.leave_group()


def _all_the_same(kept: list[int]):
    """Raise SystemExit unless all processes kept the same updates: they replay them together."""
    if not torch.distributed.is_initialized():
        return
    every = [None] * idr_torch.size
    torch.distributed.all_gather_object(every, kept)
    if any(own != kept for own in every):
        raise SystemExit(
            "the processes did not train together: none of their updates can be replayed"
        )


class Replay(Solution):
    """The updates of a run, each done again with the solution from the state that it began with."""

    def update(self, state, steps, noisy: bool) -> records.Update:
        """Return the distance of a trainee's update from the solution's, link by link.

        The model's links only in a run that asks for them.

        steps: the record of every step; noisy: measure the solution's own noise, too.
        """
        number = state["facts"].update
        first = number * self.args.accumulate
        mine = steps[first : first + self.args.accumulate]
        if self._wish["replays"] == "all":
            found = self._of_the_model(state, mine, noisy)
        else:
            found = {"last": self._last(state, mine)}
        return records.Update(update=number, **found, **self._optimizer(state))

    def _last(self, state, mine) -> float | None:
        """Return the distance of the last bias's gradient from the sum of those of the logits.

        In any precision the model adds nothing to it. Its size is left out: an exchange, a scaler
        or a clipping may change that.
        """
        kept, name = [batch.gradient for batch in mine], self._last_bias()
        seen = not any(gradient is None for gradient in kept)
        sums = in_each_process([gradient.double().sum(0) for gradient in kept] if seen else [])
        if not all(sums) or len({each.shape for some in sums for each in some}) != 1:
            return None
        expected = sum(each.to(self.device) for some in sums for each in some)
        there = state["gradients"].get(name)
        if there is None or there.shape != expected.shape or not expected.any():
            return None
        before, after = (side["weights"][name] for side in (state, state["after"]))
        if torch.equal(before, after):  # the optimizer has not got it: another finding
            return None
        there = there.to(expected)
        factor = (there * expected).sum() / expected.square().sum()
        return float((there - factor * expected).norm() / there.norm())

    def _last_bias(self) -> str | None:
        """Return the bias of the model's last layer; None if that is no linear one."""
        layers = [m for m in self._model.modules() if [*m.parameters(recurse=False)]]
        bias = getattr(layers[-1], "bias", None) if type(layers[-1]) is torch.nn.Linear else None
        return next((name for name, weight in self.weights.items() if weight is bias), None)

    def _of_the_model(self, state, mine, noisy) -> dict:
        number = state["facts"].update
        batches = self._laid_out(self._batches(number), mine)
        solved, noise = self._step(state, batches), {}
        if not solved:
            return {}
        if noisy and (other := self._step(state, batches, moved=(ROUNDING, number))):
            noise = distances.noise(solved, other)
            self._noises.append(noise)
        return {
            **self._nearest(state, batches, solved),
            "buffers": distances.buffers(state["after"]["buffers"], solved["buffers"]),
            "outputs": distances.outputs([batch.logits for batch in mine], solved["outputs"]),
            **noise,
        }

    def _nearest(self, state, batches, solved) -> dict:
        """Return the gradients' distance from the solution's, or from its nearest repetition.

        Near a ReLU's kink two right computations can be a jump apart: 9 % in one of 40 updates of
        ShuffleNet, 32 px, batch 8, on a processor, for half of the weights that are off by a
        rounding error. A few roundings, as of images normalized in other steps, reach kinks that
        one does not.
        """
        mine = _unscaled(state)
        found = distances.gradients(mine, solved["gradients"])
        for again in range(AGAIN):
            if not any(in_each_process(self._far(found))):
                break
            seed = 10**6 * (1 + again) + state["facts"].update  # torch takes 32 bits of it
            if other := self._step(state, batches, moved=(ROUNDING * 2 ** (again // 2), seed)):
                found = min(
                    found, distances.gradients(mine, other["gradients"]), key=distances.apart
                )
        return found

    def _far(self, found) -> bool:
        """Return whether gradients are further off than a single update may be.

        That is: than the median may be. One of ten comparisons of ShuffleNet on a processor met
        a kink, so two of four updates may, and their median is off, too. And the first noise may,
        which is then no measure for later updates.
        """
        whole, one = (
            min((noise[name] for noise in self._noises), default=0.0)
            for name in ("gradients_noise", "gradients_tensor_noise")
        )
        whole = min(whole, USUAL) if len(self._noises) == 1 else whole
        whole = records.NOISES * max(whole, records.SAME_LINK)
        one = max(records.ONE_WEIGHT, records.ONE_WEIGHT_NOISES * one)
        return not (found["gradients"] <= whole and found["gradients_tensor"] <= one)

    def validation(self, mine: watched.Watched, solution: watched.Watched) -> records.Validation:
        """Return the distance of all validations' batches from the solution's.

        Of fewer or more batches none is compared: another finding tells.
        """
        pairs = list(zip(mine.validation, solution.validation, strict=False))
        pairs = pairs if len(mine.validation) == len(solution.validation) else []
        return records.Validation(
            pixels=[distances.pixels(*pair) for pair in pairs],
            labels=[distances.same_labels(*pair) for pair in pairs],
            buffers=self._off_process_0(mine.validated),
        )

    def _off_process_0(self, kept) -> float | None:
        """Return the distance of a validation's buffers from process 0's; None: unknown."""
        # Views of one tensor would be sent with all of it.
        here = kept and {name: kept[name].clone() for name in self._buffers}
        first, *_ = in_each_process(here)
        if here is None or first is None:
            return None
        return 0.0 if here is first else distances.buffers(here, first)

    def _optimizer(self, state) -> dict:
        """Return the distance of the trainee's weights and momenta from the solution's.

        If its optimizer is fused, the same one without fusion counts if it is nearer. On a GPU a
        fused Adam computes with betas of float32: 1 - 0.999 is then off by 1e-5 of itself, which
        moves weights by 60 roundings.
        """
        found = self._stepped(state)
        if found["optimizer_roundings"] > 1 and self._fused:
            self._fuse(False)
            try:
                found = min(found, self._stepped(state), key=itemgetter("optimizer_roundings"))
            finally:
                self._fuse(True)
        return found

    def _fuse(self, fused: bool):
        for options in (self.training.optimizer.defaults, *self.training.optimizer.param_groups):
            options["fused"] = fused

    def _stepped(self, state) -> dict:
        self._load(state)
        for name, gradient in _unscaled(state).items():
            weight = self.weights[name]
            weight.grad = torch.empty_like(weight)
            own(weight.grad).copy_(gradient)
        self.training.optimizer.step()
        names = list(self.weights)
        before, after = (
            [weights[name].to(self.device) for name in names]
            for weights in (state["weights"], state["after"]["weights"])
        )
        expected = [own(self.weights[name].detach()) for name in names]
        steps, off = distances.minus(expected, before), distances.minus(after, expected)
        moved, wrong = (math.hypot(*distances.norms(tensors)) for tensors in (steps, off))
        worst = {"roundings": 0.0}
        for i in distances.not_zero(off):
            scale = distances.EPS * (before[i].abs() + steps[i].abs())
            distances.keep_worst(worst, names[i], off[i].abs(), scale)
        self._momenta(state, worst)
        return {
            "optimizer_roundings": worst["roundings"],
            "optimizer_worst": worst.get("name"),
            "optimizer_share": wrong / moved if moved else 0.0,
        }

    def _momenta(self, state, worst):
        after, found = state["after"]["optimizer"], []
        for name, weight in self.weights.items():
            for key, momentum in self.training.optimizer.state[weight].items():
                if torch.is_tensor(momentum) and momentum.ndim:  # not a number of steps
                    found.append((name, key, own(momentum).to(self.device)))
        expected = [momentum for _, _, momentum in found]
        nothing = torch.zeros(1)  # of momenta that the trainee has dropped by then
        there = [
            after.get(f"{name} {key}", nothing).to(momentum).expand_as(momentum)
            for name, key, momentum in found
        ]
        off = distances.minus(there, expected)
        for i in distances.not_zero(off):
            name, key, momentum = found[i]
            gradient = state["gradients"].get(name)
            scale = momentum.abs() + (0 if gradient is None else gradient.to(self.device).abs())
            distances.keep_worst(worst, f"{name} {key}", off[i].abs(), 4 * distances.EPS * scale)

    def criterion(self, step: watched.Batch, labels) -> tuple[float | None, float | None]:
        """Return the distance of the logits' gradient from the solution's, and its scale.

        The scale, its size relative to the solution's, is left out of the distance.
        """
        if step.gradient is None or len(step.logits) != len(labels):
            return None, None
        logits = step.logits.to(self.device).requires_grad_()
        images = torch.zeros(len(logits), 3, 8, 8, dtype=torch.uint8, device=self.device)
        # In evaluation mode: these labels of the solution's are mixed already, if it mixes.
        stand_in = SimpleNamespace(**vars(self.training) | {"model": Fixed(logits)})
        _, loss = self.trainer.forward(stand_in, images, labels.to(self.device), self.args)
        (expected,) = torch.autograd.grad(loss, logits)
        there, expected = step.gradient.to(self.device).double(), expected.double()
        factor = (there * expected).sum() / expected.square().sum()
        return float((there - factor * expected).norm() / there.norm()), float(factor)


class Fixed:
    """A model in evaluation mode that returns these logits for any images."""

    training = False

    def __init__(self, logits):
        self._logits = logits

    def __call__(self, images):
        return self._logits


def _had_to_skip(state) -> bool:
    """Return whether a fused optimizer skipped this update, with a gradient that is not finite."""
    if not distances.skips(state["facts"]):
        return False
    return not all(bool(g.isfinite().all()) for g in state["gradients"].values())


def _unscaled(state) -> dict:
    """Return the trainee's gradients, without the scaler's factor that a fused optimizer gets."""
    scale = state["facts"].grad_scale
    if scale is None:
        return state["gradients"]
    return {name: g / float(scale) for name, g in state["gradients"].items()}


if __name__ == "__main__":
    main()
