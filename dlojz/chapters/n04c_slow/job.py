"""The trainee's slow program beside the clean one: counted, profiled and timed.

A file of this exercise ends with `job.examine(__file__)`, whose log is judged by the exercise of
this folder. Both programs get the same weights and images, new ones in each run. Only `build`,
`train_epoch` and `evaluate` of the trainee's file are called, and the last two are timed. The
images are those of the clean program.
"""

import functools
import math
import threading
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode

from dlojz import course, idr_torch
from dlojz.chapters import harness, session
from dlojz.chapters.n04c_slow import cases
from dlojz.training import imports, private

WAIT, WARM_UP, RECORDED = 1, 1, 2  # steps of the trace
# Operators whose result the host of a GPU waits for: a number, or a size not known in advance.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "bincount"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # these wait, too, with a mask
# Calls that move numbers out of torch or its device, and calls that create them from Python.
LEAVE = {"numpy", "tolist", "__array__", "cpu"}
MADE = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"}


def examine(path):
    """Log the training of a trainee's file, at this path, beside the clean program's."""
    args = parsed()
    with session.begin(args) as (run, device), harness.one_thread(device):
        if args.costs:
            return costs(run, args)
        clean = imports.from_file(course.solution(cases.NAME), "program")
        names = ("make_data", "build", "train_epoch", *cases.FUNCTIONS)
        mine = harness.complete(imports.from_file(path, "program"), names)
        if unlike := same_model(mine, clean, device):
            run.case("file", unlike=unlike)
            run.case("times", clean_s=[], mine_s=[], differ=[])
        else:
            compared(run, mine, clean, args)


def parsed():
    """Return the arguments of the job."""
    parser = harness.parser(__doc__)
    add = functools.partial(parser.add_argument, type=int)
    add("-b", "--batch-size", default=64, help="images")
    add("--pixels", default=16, help="width and height of an image")
    add("--steps", default=12, help="training steps in a run")
    add("--batches", default=24, help="batches in each validation")
    add("--pairs", default=4 * cases.LOOK, help="timed, at most; 0 times nothing")
    add("--costs", default=0, help="rounds: measure what each fault costs, and nothing else")
    return parser.parse_args()


def same_model(mine, clean, device) -> str:
    """Return the difference of the two models' weights in words; "" if they are the same."""
    found, wanted = (
        {name: f"{tuple(t.shape)} {t.dtype}" for name, t in m.build(device)[0].state_dict().items()}
        for m in (mine, clean)
    )
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            yours, expected = (f"{name}: {way.get(name, 'none')}" for way in (found, wanted))
            return f"{yours}, expected {expected}"
    return ""


# One run -----------------------------------------------------------------------------------------


class Job:
    """A prepared run: images, a model, its optimizer. Both programs get equal ones."""

    def __init__(self, module, clean, args, seed, steps=None):
        self.module, self.device = module, idr_torch.device()
        sizes = (args.batch_size, args.pixels, self.device)
        self._images = clean.make_data(seed, steps or args.steps, *sizes)
        self._validation = clean.make_data(seed + 1, args.batches, *sizes)
        torch.manual_seed(seed)
        start = clean.build(self.device)[0].state_dict()
        self.model, self.optimizer = module.build(self.device)
        self.model.load_state_dict(start)
        self._start = self._weights()

    def train(self):
        """Train for an epoch."""
        losses, right = self.module.train_epoch(self.model, self.optimizer, self._images)
        self._found = (losses, right)

    def validate(self):
        """Validate the model."""
        loss, right = self.module.evaluate(self.model, self._validation)
        self._found += (loss, right)

    def run(self) -> float:
        """Train and validate; return the seconds."""
        return session.seconds(lambda: (self.train(), self.validate()), self.device)

    def results(self) -> dict:
        """Return all results of the run as tensors on the host."""
        values = (*self._found, self._weights() - self._start)
        return {name: as_tensor(value) for name, value in zip(cases.RESULTS, values, strict=True)}

    def _weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def as_tensor(value):
    """Return numbers of any form as a new tensor."""
    if isinstance(value, list | tuple):
        value = torch.stack([torch.as_tensor(v) for v in value])
    return torch.as_tensor(value).detach().to("cpu", torch.float64, copy=True).flatten()


def off(mine, clean) -> dict[str, float]:
    """Return each result's distance from the clean program's; infinity: other shapes, no numbers.

    Counts differ by a number of answers, all others by a share.
    """
    found = {}
    for name, (_, _, counted) in cases.RESULTS.items():
        a, b = mine[name], clean[name]
        error = math.inf
        if a.shape == b.shape:
            error = (a - b).abs().sum().item() if counted else session.away([a], [b])
        found[name] = math.inf if math.isnan(error) else error
    return found


def compared(run, mine, clean, args):
    """Log results and counts of both programs, a trace of the trainee's, and pairs of times."""
    threads = threading.active_count()
    sides = [counted(module, clean, args) for module in (mine, clean)]
    results, (seen, wanted) = zip(*sides, strict=True)
    same_data = equal_data(mine, clean, args)
    run.case("values", off=off(*results))
    run.case("mine", **seen)
    run.case("clean", **wanted)
    profiled(run, mine, clean, args)
    times = timed(mine, clean, args)
    left = threading.active_count() - threads
    run.case("file", unlike="", same_data=same_data, threads=left, size=args.batch_size)
    run.case("times", **times)


def equal_data(mine, clean, args) -> bool:
    """Return whether both programs draw the same images."""
    sizes = (args.seed, 2, args.batch_size, args.pixels, idr_torch.device())
    pairs = zip(mine.make_data(*sizes), clean.make_data(*sizes), strict=True)
    return all(
        a.dtype == b.dtype and torch.equal(a, b)
        for one, other in pairs
        for a, b in zip(one, other, strict=False)
    )


# Counting ----------------------------------------------------------------------------------------


class Operators(private.dispatch_mode()):
    """The counts of operators and other events, by place."""

    def __init__(self):
        super().__init__()
        self.places, self.calls = defaultdict(Counter), Counter()
        self.checks = False  # one_hot checks its labels, on a processor only
        self._path = ["loop"]

    @contextmanager
    def at(self, place):
        """Count the events in this context for this place."""
        self.calls[place] += 1
        self._path.append(place)
        try:
            yield
        finally:
            self._path.pop()

    def here(self) -> Counter:
        """Return the counts of the present place."""
        return self.places[self._path[-1]]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count an operator, by its result."""
        out = func(*args, **(kwargs or {}))
        backward = private.in_backward()
        counts = self.places["backward"] if backward else self.here()
        name = func.overloadpacket.__name__
        masks = name in INDEXED and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        counts["operators"] += 1
        counts["waits"] += (name in WAITS or masks) and not self.checks
        counts["float64"] += isinstance(out, torch.Tensor) and out.dtype == torch.float64
        return out


class Calls(TorchFunctionMode):
    """A counter of calls that move numbers out of torch, or create them from Python."""

    def __init__(self, operators):
        super().__init__()
        self._operators = operators

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Count a call, and do it."""
        name, kwargs, counts = getattr(func, "__name__", ""), kwargs or {}, self._operators.here()
        counts["left"] += name in LEAVE or (name == "to" and _to_the_host(args[1:], kwargs))
        counts["made"] += name in MADE
        self._operators.checks = name == "one_hot"
        try:
            return func(*args, **kwargs)
        finally:
            self._operators.checks = False


def _to_the_host(args, kwargs):
    """Return whether `to` leaves the device of the run with these arguments."""
    targets = [a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)]
    return idr_torch.device().type != "cpu" and any(torch.device(t).type == "cpu" for t in targets)


class Passes:
    """The images that leave a model's last layer, and tensors kept for a backward pass."""

    def __init__(self, model):
        self.stage = "train"
        self.images, self.kept_bytes = Counter(), Counter()
        last = [m for m in model.modules() if not [*m.children()]][-1]
        last.register_forward_hook(self._after)

    def keep(self, tensor):
        """Count a kept tensor, and return it."""
        self.kept_bytes[self.stage] += tensor.nbytes
        return tensor

    def _after(self, layer, inputs, out):
        images, back = len(out), f"back in {self.stage}"
        self.images[f"passed in {self.stage}"] += images
        if out.requires_grad:
            self.images[f"graph in {self.stage}"] += images
            out.register_hook(lambda gradient: self.images.update({back: images}))


@contextmanager
def watched(job, at):
    """Make each function with a fault, the model and the optimizer work in at(name)."""
    own = {name: getattr(job.module, name) for name in cases.FUNCTIONS}
    vars(job.module).update({name: at(name)(call) for name, call in own.items()})
    job.model.forward = at("model")(job.model.forward)
    job.optimizer.step = at("optimizer")(job.optimizer.step)
    try:
        yield
    finally:
        vars(job.module).update(own)


def counted(module, clean, args) -> tuple[dict, dict]:
    """Return the results of a run, and its counts by place."""
    job, operators = Job(module, clean, args, args.seed), Operators()
    passes = Passes(job.model)
    with (
        watched(job, operators.at),
        torch.autograd.graph.saved_tensors_hooks(passes.keep, lambda tensor: tensor),
        Calls(operators),
        operators,
    ):
        job.train()
        passes.stage = "validation"
        job.validate()
    size = args.batch_size
    return job.results(), {
        "places": {place: +counts for place, counts in operators.places.items()},
        "calls": operators.calls,
        "images": passes.images,
        "kept_bytes": passes.kept_bytes["validation"],
        "given": {"train": args.steps * size, "validation": args.batches * size},
    }


# The trace, the times and the costs --------------------------------------------------------------


# The phases of a step, by their first function; and those that begin after a function.
BEGIN = {"train_step": "data", "model": "forward", "balanced_loss": "forward"}
BEGIN |= {"clip": "update", "optimizer": "update"}
END = {"balanced_loss": "backward", "train_step": None}


def profiled(run, module, clean, args):
    """Save a trace of a few steps of training, and log the times of a run's two parts."""
    job = Job(module, clean, args, args.seed, WAIT + WARM_UP + RECORDED)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=RECORDED, repeat=1),
        on_trace_ready=run.save_trace,
    )
    phase = ExitStack()  # the range of the present one

    def begin(phases, name):
        if name in phases:
            phase.close()
            if phases[name]:
                phase.enter_context(torch.profiler.record_function(phases[name]))

    @contextmanager
    def at(name):
        begin(BEGIN, name)
        yield
        begin(END, name)
        if name == "train_step":
            profiler.step()

    profiler.start()
    with watched(job, at):
        job.train()
    profiler.stop()
    job = Job(module, clean, args, args.seed)
    spent = [session.seconds(part, job.device) for part in (job.train, job.validate)]
    run.case("parts", train_s=spent[0], validation_s=spent[1], batches=args.batches)


def timed(mine, clean, args) -> dict:
    """Return the seconds of both programs in pairs of runs, each with images of its own.

    It ends as soon as the interval of their ratio decides, or after --pairs.
    """
    clean_s, mine_s, differ = [], [], []
    for pair in range(args.pairs):
        order = [(clean_s, clean), (mine_s, mine)][:: -1 if pair % 2 else 1]  # A B B A
        results = {}
        for spent, module in order:
            job = Job(module, clean, args, args.seed + 10 + 2 * pair)
            spent.append(job.run())
            results[module] = job.results()
        differ.append(off(results[mine], results[clean]))
        if len(mine_s) % cases.LOOK == 0:
            _, low, high = cases.ratio(mine_s, clean_s)
            if cases.as_fast(low, high) is not None:
                break
    return {"clean_s": clean_s, "mine_s": mine_s, "differ": differ}


def mixed(faults):
    """Return the clean program with the faults of these functions."""
    files = (course.solution(cases.NAME), course.prepared(cases.NAME))
    clean, broken = (imports.from_file(file, "program") for file in files)
    chosen = {f: getattr(broken if f in faults else clean, f) for f in cases.FUNCTIONS}
    vars(clean).update(chosen)  # a function finds the others in its own file
    vars(broken).update(chosen)
    return clean


def costs(run, args):
    """Log the seconds of the slow program, repair by repair, and of the clean one with one fault.

    The programs take turns, so that a disturbance affects all.
    """
    names = cases.FUNCTIONS
    programs = {f"repaired {n}": mixed(names[n:]) for n in range(len(names) + 1)}
    programs |= {f"only {name}": mixed([name]) for name in names}
    clean, seconds = mixed([]), {name: [] for name in programs}
    for turn in range(args.costs + 1):
        for name, module in programs.items():
            spent = Job(module, clean, args, args.seed + 2 * turn).run()
            seconds[name] += [spent] if turn else []  # the first turn warms up
    for name, spent in seconds.items():
        run.case(name, seconds=spent)
