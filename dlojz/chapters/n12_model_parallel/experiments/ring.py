"""Long sequences, divided among processes: ring attention and Ulysses beside the whole, by length.

Submitted by a notebook: submit("dlojz/chapters/n12_model_parallel/experiments/ring.py", n_gpu=2).

Each way computes attention, without a mask, and its gradients. It is timed with its messages,
without them (its results are wrong then), and its messages are timed alone.
"""

import argparse
from functools import partial

import torch
from torch import distributed
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.course import UserError
from dlojz.training import flags, private

ON_GPU = {"lengths": [8192, 16384, 32768, 65536], "heads": 16, "head": 128, "precision": "bf16"}
ON_CPU = {"lengths": [256, 512, 1024, 2048], "heads": 4, "head": 32, "precision": "fp32"}


class Link:
    """The messages of a process, and the bytes that it sends.

    talks: whether messages are sent; otherwise a process receives its own
    """

    def __init__(self, talks=True):
        self.talks, self.sent = talks, 0

    def hand_on(self, tensor, more=True):
        """Begin to send a tensor to the next process; return what comes, and a call to wait."""
        if not (self.talks and more):
            return tensor, list
        self.sent += tensor.nbytes
        rank, size, comes = idr_torch.rank, idr_torch.size, torch.empty_like(tensor)
        to = distributed.P2POp(distributed.isend, tensor, (rank + 1) % size)
        of = distributed.P2POp(distributed.irecv, comes, (rank - 1) % size)
        works = distributed.batch_isend_irecv([to, of])
        return comes, lambda sent=tensor: [work.wait() for work in works]  # sent: kept until then

    def swap(self, pieces):
        """Send a piece to each process, and return those that come from each."""
        if not self.talks:
            return pieces
        self.sent += pieces.nbytes * (len(pieces) - 1) // len(pieces)
        comes = torch.empty_like(pieces)
        distributed.all_to_all_single(comes, pieces)
        return comes


def merge(out, logarithms, some, others):
    """Return attention over two pieces, by the online softmax of 10c."""
    both = torch.logaddexp(logarithms, others)
    parts = (x * (own - both).exp()[..., None] for x, own in ((out, logarithms), (some, others)))
    return sum(parts), both


def whole(link, work, q, k, v, gradient):
    """Return attention of these tokens to themselves, and the gradients."""
    flash, gradients, _ = work
    out, *kept = flash(q, k, v)
    return out, *gradients(gradient, q, k, v, out, *kept)


def ring(link, work, q, k, v, gradient):
    """Return attention of own tokens to all: keys and values go round, and their gradients too."""
    flash, gradients, merge = work
    kv, hops, out, logarithms = torch.stack((k, v)), idr_torch.size, None, None
    for hop in range(hops):
        coming, wait = link.hand_on(kv, hop < hops - 1)
        some, others, kept = flash(q, *kv)
        out, logarithms = merge(out, logarithms, some, others) if hop else (some.float(), others)
        wait()
        kv = coming
    out = out.to(q.dtype)
    kv, of_q, travelling, arrive = torch.stack((k, v)), 0, 0, list
    for hop in range(hops):
        coming, wait = link.hand_on(kv, hop < hops - 1)
        part, *of_kv = gradients(gradient, q, *kv, out, logarithms, kept)
        of_q = of_q + part
        arrive()  # the gradients so far of these keys and values
        travelling, arrive = link.hand_on(torch.stack(of_kv) + travelling)
        wait()
        kv = coming
    arrive()
    return out, of_q, *travelling


def ulysses(link, work, q, k, v, gradient):
    """Return attention of some heads to all tokens, with all heads of own tokens before and after.

    Tensors are [..., heads, tokens, head].
    """
    size = idr_torch.size

    def to_heads(x):
        return torch.cat([*link.swap(torch.stack(x.chunk(size, -3)))], -2)

    def to_tokens(x):
        return torch.cat([*link.swap(torch.stack(x.chunk(size, -2)))], -3)

    out, *found = whole(link, work, *to_heads(torch.stack((q, k, v))), to_heads(gradient))
    return to_tokens(out), *to_tokens(torch.stack(found))


WAYS = {"ring": ring, "Ulysses": ulysses}
WORK = private.flash, private.flash_gradients, merge
NO_WORK = (  # results of the right shapes, for messages alone
    lambda q, k, v: (q, None, None),
    lambda gradient, q, k, v, *_: (q, k, v),
    lambda out, logarithms, *_: (out, logarithms),
)


def measured(args, length, device) -> dict:
    """Return the fields of each way for this length."""
    torch.manual_seed(length)
    dtype = session.DTYPES.get(args.precision, torch.float32)
    shape = 1, args.heads, length, args.head
    given = [torch.randn(shape, device=device).to(dtype) for _ in range(4)]
    own = [x.chunk(idr_torch.size, 2)[idr_torch.rank].contiguous() for x in given]
    results = whole(None, WORK, *given)
    expected = [x.chunk(idr_torch.size, 2)[idr_torch.rank].float() for x in results]
    calls, found = {("whole", "ms"): partial(whole, None, WORK, *given)}, {"whole": {}}
    for way, call in WAYS.items():
        link = Link()
        results = [x.float() for x in call(link, WORK, *own)]
        found[way] = {
            "sent_bytes": link.sent,
            "output_away": session.away(results[:1], expected[:1]),
        }
        found[way]["away"] = session.away(results[1:], expected[1:])
        calls[way, "ms"] = partial(call, Link(), WORK, *own)
        calls[way, "compute_ms"] = partial(call, Link(talks=False), WORK, *own)
        calls[way, "messages_ms"] = partial(call, Link(), NO_WORK, *own)
    for (way, what), ms in session.in_turn(calls, device, args.rounds, warm_up=1).items():
        found[way][what] = ms
    return found


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, positive = parser.add_argument, flags.at_least(1)
    add("--lengths", type=positive, nargs="+", help="tokens of all processes together")
    add("--heads", type=positive, help="heads of an attention")
    add("--head", type=positive, help="numbers of a head")
    add("--precision", choices=("fp32", "bf16"), help="a format; a GPU needs bf16")
    add("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _), session.process_group(device):
        n, counts = idr_torch.size, (*args.lengths, args.heads)
        if n < 2 or any(count % n for count in counts):
            raise UserError(f"{n} processes: expected two or more, that divide each of {counts}")
        for length in tqdm(args.lengths, unit="length"):
            for way, fields in measured(args, length, device).items():
                run.case(f"{way}, {length:,}", way=way, tokens=length, **fields)


if __name__ == "__main__":
    main()
