"""The slow program that a trainee repairs, run beside the clean one: counted, profiled and timed.

A file of this exercise ends with `job.examine(__file__)`. What that logs is judged by
the exercise of this folder. Both programs get the same weights and images, new ones in each run.
Of the trainee's file only `build`, `train_epoch` and `evaluate` are called, and the last two are
timed. The images come from the clean program.
"""

import argparse
import functools
import math
import secrets
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from time import perf_counter

import torch
from torch.overrides import TorchFunctionMode

from dlojz import course, idr_torch
from dlojz.chapters.n04c_slow import cases
from dlojz.chapters.session import away, wait
from dlojz.runs import log
from dlojz.training import imports, private

WAIT, WARM_UP, RECORDED = 1, 1, 2  # steps of the trace
# Operators whose result the host waits for on a GPU: a number, or a size not known in advance.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "bincount"}
# Calls with which numbers leave torch or its device, and with which they come from Python.
LEAVE = {"numpy", "tolist", "__array__", "cpu"}
MADE = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"}
COUNTS = ("right answers", "right answers in the validation")
RESULTS = ("losses", COUNTS[0], "loss in the validation", COUNTS[1], "change of the weights")


def examine(path):
    """Log how this file trains beside the clean program. path: of the trainee's file."""
    args = parsed()
    run = log.open_run(args)
    device = idr_torch.device()
    run.experiment(device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # such small operations only wait for other threads
    clean = imports.from_file(course.solution(cases.NAME), "program")
    if args.costs:
        costs(run, args, device)
        run.end()
        return
    mine = imports.from_file(path, "program")
    complete(mine)
    if unlike := same_model(mine, clean, device):
        run.case("file", unlike=unlike)
        run.case("times", clean_s=[], mine_s=[], differ=[])
    else:
        compared(run, mine, clean, args, device)
    run.end()


def parsed():
    """Return the arguments of the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = functools.partial(parser.add_argument, type=int)
    add("--seed", default=secrets.randbits(32), help="seed of all random draws")
    add("-b", "--batch-size", default=64, help="images")
    add("--pixels", default=16, help="width and height of an image")
    add("--steps", default=12, help="training steps in a run")
    add("--batches", default=24, help="batches in each validation")
    add("--pairs", default=4 * cases.LOOK, help="timed, at most; 0 times nothing")
    add("--costs", default=0, help="rounds: measure what each fault costs, and nothing else")
    return parser.parse_args()


def complete(module):
    """Raise UserError if a function is missing that is called or watched."""
    names = ("make_data", "build", "train_epoch", *cases.FUNCTIONS)
    if missing := [name for name in names if not callable(getattr(module, name, None))]:
        raise course.UserError(
            f"no function {', '.join(missing)} in your file: expected {', '.join(names)}; "
            "put it back, with the same arguments"
        )


def same_model(mine, clean, device) -> str:
    """Return how the weights of the two models differ; "" if they do not."""
    found, wanted = (
        {name: f"{tuple(t.shape)} {t.dtype}" for name, t in m.build(device)[0].state_dict().items()}
        for m in (mine, clean)
    )
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    sides = [f"{names[0]}: {way.get(names[0], 'none')}" for way in (found, wanted)] if names else []
    return ", expected ".join(sides)


# One run -----------------------------------------------------------------------------------------


class Job:
    """A run that is prepared: images, a model, its optimizer. Both programs get equal ones."""

    def __init__(self, module, clean, args, seed, device):
        sizes = (args.batch_size, args.pixels, device)
        self.module, self.device = module, device
        self.train = clean.make_data(seed, args.steps, *sizes)
        self.validation = clean.make_data(seed + 1, args.batches, *sizes)
        torch.manual_seed(seed)
        start = clean.build(device)[0].state_dict()
        self.model, self.optimizer = module.build(device)
        self.model.load_state_dict(start)
        self._start = self._weights()

    def run(self, between=lambda: None) -> float:
        """Train and validate; return the seconds."""
        wait(self.device)
        begin = perf_counter()
        losses, right = self.module.train_epoch(self.model, self.optimizer, self.train)
        between()
        loss, known = self.module.evaluate(self.model, self.validation)
        wait(self.device)
        seconds = perf_counter() - begin
        self._found = (losses, right, loss, known)
        return seconds

    def results(self) -> dict:
        """Return all results of the run as tensors on the host."""
        values = (*self._found, self._weights() - self._start)
        return {name: as_tensor(value) for name, value in zip(RESULTS, values, strict=True)}

    def _weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def as_tensor(value):
    """Return numbers as a tensor of its own, in whatever form a program returns them."""
    if isinstance(value, list | tuple):
        value = torch.stack([torch.as_tensor(v) for v in value])
    return torch.as_tensor(value).detach().to("cpu", torch.float64, copy=True).flatten()


def off(mine, clean) -> dict[str, float]:
    """Return how far each result is from the clean program's; infinity: other shapes, no numbers.

    Counts by how many answers, all others as a share.
    """
    found = {}
    for name in RESULTS:
        a, b = mine[name], clean[name]
        error = math.inf
        if a.shape == b.shape:
            error = (a - b).abs().sum().item() if name in COUNTS else away([a], [b])
        found[name] = math.inf if math.isnan(error) else error
    return found


def compared(run, mine, clean, args, device):
    """Log what both programs compute and do, a trace of the trainee's, and pairs of times."""
    threads = threading.active_count()
    sides = [counted(module, clean, args, device) for module in (mine, clean)]
    results, (seen, wanted) = zip(*sides, strict=True)
    same_data = equal_data(mine, clean, args, device)
    run.case("values", off=off(*results))
    run.case("mine", **seen)
    run.case("clean", **wanted)
    profiled(run, mine, clean, args, device)
    times = timed(mine, clean, args, device)
    left = threading.active_count() - threads
    run.case("file", unlike="", same_data=same_data, threads=left, size=args.batch_size)
    run.case("times", **times)


def equal_data(mine, clean, args, device) -> bool:
    """Return whether both programs draw the same images."""
    sizes = (args.seed, 2, args.batch_size, args.pixels, device)
    pairs = zip(mine.make_data(*sizes), clean.make_data(*sizes), strict=True)
    return all(
        a.dtype == b.dtype and torch.equal(a, b)
        for one, other in pairs
        for a, b in zip(one, other, strict=False)
    )


# Counting ----------------------------------------------------------------------------------------


class Operators(private.dispatch_mode()):
    """The count of operators, by the place that asks for them."""

    def __init__(self, place):
        super().__init__()
        self._place = place
        self.counts = Counter()
        self.checks = False  # one_hot looks at its labels: on a processor only

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count an operator, do it, and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        backward = private.in_backward()
        place = "backward" if backward else self._place()
        name = func.overloadpacket.__name__
        self.counts[place, "operators"] += 1
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        self.counts[place, "waits"] += (name in WAITS or masks) and not self.checks
        wide = isinstance(out, torch.Tensor) and out.dtype == torch.float64
        self.counts[place, "float64"] += wide
        return out


class Calls(TorchFunctionMode):
    """The count of calls with which numbers leave torch, or come from Python."""

    def __init__(self, place, operators):
        super().__init__()
        self._place, self._operators = place, operators
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Count a call, and do it."""
        name = getattr(func, "__name__", "")
        away = name in LEAVE or (name == "to" and _to_the_host(args[1:], kwargs or {}))
        self.counts[self._place(), "left"] += away
        self.counts[self._place(), "made"] += name in MADE
        self._operators.checks = name == "one_hot"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._operators.checks = False


def _to_the_host(args, kwargs):
    targets = [a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)]
    return any(torch.device(target).type == "cpu" for target in targets) and not _is_on_cpu_only()


def _is_on_cpu_only():
    """Return whether "cpu" is just the device of the run: then `.to(device)` leaves nothing."""
    return idr_torch.device().type == "cpu"


class Passes:
    """The images that a model's last layer puts out, and those whose gradient comes back."""

    def __init__(self, model):
        self.stage = "train"
        self.seen = Counter()
        last = [m for m in model.modules() if not [*m.children()]][-1]
        last.register_forward_hook(self._after)

    def _after(self, layer, inputs, out):
        stage, images = self.stage, len(out)
        self.seen[stage, "passed"] += images
        self.seen[stage, "graph"] += images * out.requires_grad
        if out.requires_grad:
            out.register_hook(functools.partial(self._back, stage, images))

    def _back(self, stage, images, gradient):
        self.seen[stage, "back"] += images


@contextmanager
def watched(module, before, after):
    """Call before(name) and after(name) around each of the functions with a fault, meanwhile."""
    own = {name: getattr(module, name) for name in cases.FUNCTIONS}

    def around(name, call):
        @functools.wraps(call)
        def watch(*args, **kwargs):
            before(name)
            try:
                return call(*args, **kwargs)
            finally:
                after(name)

        return watch

    vars(module).update({name: around(name, call) for name, call in own.items()})
    try:
        yield
    finally:
        vars(module).update(own)


def counted(module, clean, args, device) -> tuple[dict, dict]:
    """Return the results of a run, and what the program did in it, place by place."""
    job, places, calls = Job(module, clean, args, args.seed, device), ["loop"], Counter()
    passes, kept = Passes(job.model), Counter()

    def enter(name):
        places.append(name)
        calls[name] += 1

    def leave(name):
        places.pop()

    def validation():
        passes.stage = "validation"

    def keep(tensor):
        kept[passes.stage] += tensor.numel() * tensor.element_size()
        return tensor

    job.model.register_forward_pre_hook(lambda *_: enter("model"))
    job.model.register_forward_hook(lambda *_: leave("model"), always_call=True)
    job.optimizer.register_step_pre_hook(lambda *_: enter("optimizer"))
    job.optimizer.register_step_post_hook(lambda *_: leave("optimizer"))
    operators = Operators(lambda: places[-1])
    python = Calls(lambda: places[-1], operators)
    with ExitStack() as stack:
        stack.enter_context(watched(module, enter, leave))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t))
        stack.enter_context(python)
        stack.enter_context(operators)
        job.run(between=validation)
    seen = {"places": {}, "calls": dict(calls)}
    for (place, what), count in (operators.counts + python.counts).items():
        seen["places"].setdefault(place, {})[what] = count
    seen["images"] = {f"{what} in {stage}": n for (stage, what), n in passes.seen.items()}
    seen["kept_bytes"] = kept["validation"]
    seen["given"] = {"train": args.steps * args.batch_size}
    seen["given"]["validation"] = args.batches * args.batch_size
    return job.results(), seen


# The trace ---------------------------------------------------------------------------------------


# The phases that begin with a function, and when it has returned.
BEGIN = {"train_step": "data", "balanced_loss": "forward", "clip": "update"}
END = {"balanced_loss": "backward", "train_step": None}


class Phases:
    """The phases of a step as ranges of a trace, begun by the functions that are called."""

    def __init__(self, profiler):
        self._profiler, self._range = profiler, None

    def begin(self, phase):
        """End a phase and begin the next one; None only ends."""
        if self._range:
            self._range.__exit__(None, None, None)
        self._range = torch.profiler.record_function(phase) if phase else None
        if self._range:
            self._range.__enter__()

    def before(self, name):
        """Begin the phase of a function."""
        if name in BEGIN:
            self.begin(BEGIN[name])

    def after(self, name):
        """Begin the phase that follows a function; count a step that has ended."""
        if name in END:
            self.begin(END[name])
        if name == "train_step":
            self._profiler.step()


def profiled(run, module, clean, args, device):
    """Save a trace of a few steps of training, and log how long a run's two parts take."""
    steps = argparse.Namespace(**vars(args) | {"steps": WAIT + WARM_UP + RECORDED})
    job = Job(module, clean, steps, args.seed, device)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=RECORDED, repeat=1),
        on_trace_ready=run.save_trace,
    )
    phases = Phases(profiler)
    job.model.register_forward_pre_hook(
        lambda *_: phases.begin("forward") if job.model.training else None
    )
    job.optimizer.register_step_pre_hook(lambda *_: phases.begin("update"))
    profiler.start()
    with watched(module, phases.before, phases.after):
        module.train_epoch(job.model, job.optimizer, job.train)
    profiler.stop()
    job, marks = Job(module, clean, args, args.seed, device), [perf_counter()]
    job.run(between=lambda: (wait(device), marks.append(perf_counter())))
    marks.append(perf_counter())
    spent = {"train_s": marks[1] - marks[0], "validation_s": marks[2] - marks[1]}
    spent["batches"] = args.batches
    run.case("parts", **spent)


# The times ---------------------------------------------------------------------------------------


def timed(mine, clean, args, device) -> dict:
    """Return the seconds of both programs in pairs of runs, each with images of its own.

    It ends as soon as the interval of their ratio decides, or after as many pairs as were asked.
    """
    clean_s, mine_s, differ = [], [], []
    for pair in range(args.pairs):
        seed = args.seed + 10 + 2 * pair
        order = [(clean_s, clean), (mine_s, mine)][:: -1 if pair % 2 else 1]  # A B B A
        results = {}
        for spent, module in order:
            job = Job(module, clean, args, seed, device)
            spent.append(job.run())
            results[module] = job.results()
        differ.append(off(results[mine], results[clean]))
        if len(mine_s) % cases.LOOK == 0:
            _, low, high = cases.ratio(mine_s, clean_s)
            if cases.as_fast(low, high) is not None:
                break
    return {"clean_s": clean_s, "mine_s": mine_s, "differ": differ}


# The costs ---------------------------------------------------------------------------------------


def mixed(faults):
    """Return the clean program with these of its functions as slow as they were handed out."""
    clean = imports.from_file(course.solution(cases.NAME), "program")
    broken = imports.from_file(course.prepared(cases.NAME), "program")
    chosen = {f: getattr(broken if f in faults else clean, f) for f in cases.FUNCTIONS}
    vars(clean).update(chosen)  # a function looks for the others in the file that it is from
    vars(broken).update(chosen)
    return clean


def costs(run, args, device):
    """Log the seconds of the slow program as it is repaired, and of the clean one with one fault.

    The programs take turns, so that what disturbs one disturbs all.
    """
    names = cases.FUNCTIONS
    programs = {f"repaired {n}": mixed(names[n:]) for n in range(len(names) + 1)}
    programs |= {f"only {name}": mixed([name]) for name in names}
    clean, seconds = mixed([]), {name: [] for name in programs}
    for turn in range(args.costs + 1):
        for name, module in programs.items():
            spent = Job(module, clean, args, args.seed + 2 * turn, device).run()
            seconds[name] += [spent] if turn else []  # the first turn warms up
    for name, spent in seconds.items():
        run.case(name, seconds=spent)
