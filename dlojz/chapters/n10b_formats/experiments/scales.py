"""The numbers of a training in eight bits: what E4M3 and E5M2 keep, with scales of several kinds.

Submitted by a notebook: submit("dlojz/chapters/n10b_formats/experiments/scales.py").

A small vision transformer is trained as usual. In some steps the inputs, the weights and the output
gradients of its linear layers are cast to 8 bits and back. A delayed scale comes from the largest
magnitudes of the steps before, so it is known before the tensor is.
"""

from collections import defaultdict

import torch

from dlojz import idr_torch
from dlojz.chapters import resident, session
from dlojz.chapters.n10b_formats import bits, vit
from dlojz.training import flags

FORMATS = {"E4M3": bits.E4M3, "E5M2": bits.E5M2}
HISTORY = 16  # steps whose largest magnitude counts
ROUNDING = 1 + 1e-5  # of a largest number times its own scale


def kept(x, scale, dtype):
    """Return the distance of a tensor from its cast, the share of zeros, and of clipped numbers.

    Numbers that were zero before do not count.
    """
    back = bits.cast(x, scale, dtype).float() / scale
    away = (back - x).norm() / x.norm().clamp(min=bits.TINY)
    some = x != 0
    count = some.sum().clamp(min=1)
    zeros = ((back == 0) & some).sum() / count
    clipped = ((x * scale).abs() > ROUNDING * bits.LARGEST[dtype]).sum() / count
    return torch.stack([away, zeros, clipped])


class Watch:
    """The casts of the tensors of a model's linear layers, in some steps.

    every: steps from one to the next.
    """

    def __init__(self, model, every: int):
        self.every, self.step = every, -1
        self.largest = defaultdict(list)  # by layer and tensor, of each step
        self.found = defaultdict(list)  # by tensor, format and scale: of each layer and step
        self.steps = []
        for name, layer in bits.linears(model).items():
            layer.register_forward_pre_hook(self.before(name))
            layer.register_full_backward_hook(self.after(name))

    def __call__(self):
        """Begin a step."""
        self.step += 1
        if self.step % self.every == 0:
            self.steps.append(self.step)

    def before(self, name):
        def hook(layer, inputs):
            self.note(name, "inputs", inputs[0])
            self.note(name, "weights", layer.weight)

        return hook

    def after(self, name):
        return lambda layer, of_inputs, of_outputs: self.note(name, "gradients", of_outputs[0])

    @torch.no_grad()
    def note(self, layer, tensor, x):
        """Note the largest magnitude of a tensor, and in some steps its casts."""
        x = x.float().flatten(0, -2)
        largest, rows = x.abs().amax(), x.abs().amax(1, keepdim=True)
        history = self.largest[layer, tensor]
        past = torch.stack(history[-HISTORY:]).amax() if history else largest
        history.append(largest)
        if self.step % self.every:
            return
        for name, dtype in FORMATS.items():
            scales = {"none": torch.ones_like(largest), "tensor": bits.scaled(largest, dtype)}
            scales |= {"row": bits.scaled(rows, dtype), "delayed": bits.scaled(past, dtype)}
            scales["delayed, with room"] = scales["delayed"] / 2
            for kind, scale in scales.items():
                self.found[tensor, name, kind].append(kept(x, scale, dtype))

    def cases(self):
        """Yield the fields of each tensor, format and scale; a list holds one number per step.

        away is the median of the layers, as are zeros; clipped and worst are of the worst layer.
        """
        for (tensor, name, kind), values in self.found.items():
            each = torch.stack(values).view(len(self.steps), -1, 3)
            away, zeros, clipped = each.unbind(-1)
            found = {"away": away.median(1)[0], "worst": away.amax(1)}
            found |= {"zeros": zeros.median(1)[0], "clipped": clipped.amax(1)}
            lists = {what: column.tolist() for what, column in found.items()}
            yield {"tensor": tensor, "format": name, "scale": kind, "steps": self.steps, **lists}


def main():
    device = idr_torch.device()
    parser = vit.parser(__doc__, device)
    every = 10 if device.type == "cuda" else 4
    parser.add_argument("--every", type=flags.at_least(1), default=every, help="steps")
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        made = []

        def watch(model):
            made.append(Watch(model, args.every))
            return made[0]

        vit.train(args, resident.draw(args, device), device, watch=watch)
        for fields in made[0].cases():
            run.case("{tensor}, {format}, {scale}".format(**fields), **fields)


if __name__ == "__main__":
    main()
