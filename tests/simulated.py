"""A small simulator of a host and its GPU, which writes the trace that torch's profiler would.

The host does one thing after the other: an operation costs it time, a call puts work into the
queue of the device and returns. The device does its work in order, each kernel LATENCY after its
call at the earliest, and PAUSE after the one before. A call that waits returns when the device has
done all that it was asked. So the same training with a fault and without it tells what that costs.

    machine = Machine()
    for step in machine.steps():
        machine.train(MODEL)
        machine.sleep(30)
    machine.write(path)
"""

from contextlib import contextmanager

from traces import CONV, LOADER, RELU, Made

LATENCY, PAUSE = 0.004, 0.0015  # from a call to its kernel, between two kernels
PYTHON, CALL = 0.012, 0.006  # what an operation costs the host, and the call in it
RETURN = 0.0005  # what it costs to leave an operation
AHEAD = 1000  # tasks that fit into the queue: when it is full, a call blocks
MAIN, BACKWARD = 1, 2  # threads
ACTIVE = 2  # steps that are recorded

# Kernels of a step in ms: (name, how many, how long each is).
LARGE = ((CONV, 40, 0.2), (RELU, 40, 0.06))  # the device is slower than its host
MIDDLE = ((CONV, 40, 0.035), (RELU, 40, 0.012))  # a little
TINY = ((CONV, 40, 0.006), (RELU, 40, 0.002))  # much faster: such as a ViT with two images


class Machine(Made):
    """A host with a GPU, and the trace of the last steps of a training on it."""

    def __init__(self, functions=False, warm_up=3):
        super().__init__()
        self.functions = functions  # whether Python's functions are recorded
        self.warm_up = warm_up  # steps before those that are recorded
        self.now, self.free = 0.0, 0.0  # when the host is, when the device has done all
        self.thread, self.recording = MAIN, False
        self.begins = []  # of all tasks
        self.ends = []  # of the steps, when both had done them

    def steps(self):
        """Yield the numbers of the steps, and record the last of them."""
        for number in range(self.warm_up + ACTIVE):
            self.recording = number >= self.warm_up
            begin = self.now
            yield number
            self._host("user_annotation", f"ProfilerStep#{number}", begin)
            self.ends.append(max(self.now, self.free))

    @property
    def step_ms(self):
        """Return how long a step takes in the second half, host or device, whichever is later."""
        half = len(self.ends) // 2
        return (self.ends[-1] - self.ends[half - 1]) / (len(self.ends) - half)

    def _host(self, category, name, begin, **args):
        """Record what this thread did from `begin` until now."""
        if self.recording:
            self.host(category, name, begin, self.now, **args)
            self.events[-1]["tid"] = self.thread

    @contextmanager
    def range(self, name, category="user_annotation", cost=0.0):
        """Name what happens inside, which costs the host a little."""
        begin, self.now = self.now, self.now + cost
        yield
        self.now += RETURN
        self._host(category, name, begin)

    def op(self, name, cost=PYTHON):
        """Run an operation of torch."""
        return self.range(name, "cpu_op", cost)

    def task(self, name, ms, call="cudaLaunchKernel", cost=CALL):
        """Ask the device for a kernel or a copy, in a call that costs the host time."""
        if len(self.begins) >= AHEAD:
            self.now = max(self.now, self.begins[-AHEAD])
        begin, self.now = self.now, self.now + cost
        start = max(begin + LATENCY, self.free + (PAUSE if self.begins else 0))
        self.begins.append(start)
        self.free = start + ms
        self.number += 1
        number = self.number + 10**6
        self._host("cuda_runtime", call, begin, correlation=number)
        self._device(name, start, ms, number)
        return start

    def _device(self, name, begin, ms, number):
        category = "gpu_memcpy" if name.startswith("Mem") else "kernel"
        args = {"device": 0, "stream": 7, "correlation": number}
        times = {"ts": 1e6 + 1000 * begin, "dur": 1000 * ms}
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, **times}
        self.events.append(event | {"args": args})

    def write(self, path):
        """Write the trace; of what was asked for before it, the device still does the last."""
        begin = min(e["ts"] for e in self.events if e["name"].startswith("ProfilerStep"))
        self.events = [e for e in self.events if e["ts"] + e["dur"] > begin]
        return super().write(path)

    def kernel(self, op, name, ms):
        with self.op(op):
            self.task(name, ms)

    def wait(self, call, cost=0.003):
        """Wait in a call until the device has done everything."""
        begin, self.now = self.now, max(self.now + cost, self.free)
        self._host("cuda_runtime", call, begin)

    # A training ------------------------------------------------------------------------------

    def train(self, model):
        """Run a forward and a backward pass, which has a thread of its own, and an update."""
        with self.range("forward"):
            self.kernels("aten::conv2d", model, 1)
        with self.range("backward"):
            self.thread = BACKWARD
            self.kernels("aten::convolution_backward", model, 2)
            self.thread = MAIN
        with self.range("update"):
            for _ in range(4):
                self.kernel("aten::_foreach_add_", RELU, 0.01)

    def kernels(self, op, model, factor):
        for name, count, ms in model:
            for _ in range(count):
                self.kernel(op, name, factor * ms)

    def load(self, ms):
        """Wait for a batch, and copy it from pinned memory."""
        with self.range(LOADER, cost=ms):
            pass
        with self.op("aten::to"):
            self.task("Memcpy HtoD (Pinned -> Device)", 0.2, "cudaMemcpyAsync")

    # What may go wrong -----------------------------------------------------------------------

    def sleep(self, ms):
        """Do something that torch does not see."""
        self._python("trainer.py(7): augment", ms)

    def collect(self, ms):
        """Run the garbage collector, which a trace without Python's functions does not tell."""
        self._python("Python GC", ms)

    def _python(self, function, ms):
        """Spend time in a function of Python, which the trace may name."""
        if self.functions:
            with self.range(function, "python_function", ms):
                pass
        else:
            self.now += ms

    def item(self):
        """Read a number of the device."""
        with self.op("aten::item", 0.001), self.op("aten::_local_scalar_dense", 0.002):
            self.task("Memcpy DtoH (Device -> Pageable)", 0.001, "cudaMemcpyAsync")
            self.wait("cudaStreamSynchronize")

    def is_nonzero(self):
        with self.op("aten::is_nonzero", 0.001):
            self.item()

    def nonzero(self):
        with self.op("aten::nonzero"):
            self.task(RELU, 0.003)
            self.task("Memcpy DtoH (Device -> Pageable)", 0.001, "cudaMemcpyAsync")
            self.wait("cudaStreamSynchronize")

    def cpu(self, ms=0.5):
        """Copy a tensor to the host."""
        with self.op("aten::to"), self.op("aten::_to_copy", 0.001), self.op("aten::copy_", 0.001):
            self.task("Memcpy DtoH (Device -> Pageable)", ms, "cudaMemcpyAsync")
            self.wait("cudaStreamSynchronize")

    def norms(self, count):
        """Read the norms of this many gradients, one by one."""
        for _ in range(count):
            self.kernel("aten::linalg_vector_norm", RELU, 0.003)
            self.item()

    def print(self, numbers):
        """Print a tensor, as torch/_tensor_str.py formats it."""
        with self._formatting():
            for op in ("aten::isfinite", "aten::ne", "aten::__and__"):
                self.kernel(op, RELU, 0.002)
            with self.op("aten::masked_select"):
                self.nonzero()
            for op in ("aten::abs", "aten::min", "aten::max", "aten::ceil", "aten::ne"):
                self.kernel(op, RELU, 0.002)
            self.is_nonzero()
            for _ in range(numbers):
                with self.op("aten::detach", 0.001):
                    pass
                self.item()

    @contextmanager
    def _formatting(self):
        if self.functions:
            with (
                self.range("trainer.py(9): report", "python_function"),
                self.range("torch/_tensor_str.py(702): _str", "python_function"),
            ):
                yield
        else:
            yield

    def synchronize(self):
        self.wait("cudaDeviceSynchronize")

    def empty_cache(self, blocks, each_ms=0.15):
        """Give this many blocks of memory back to CUDA, and take them again."""
        for _ in range(blocks):
            self.wait("cudaFree", each_ms)
        for _ in range(blocks):
            with self.range("cudaMalloc", "cuda_runtime", each_ms):
                pass

    def pageable(self, ms):
        """Copy a batch from pageable memory, and wait for it."""
        with self.op("aten::to"), self.op("aten::_to_copy", 0.001), self.op("aten::copy_", 0.001):
            start = self.task("Memcpy HtoD (Pageable -> Device)", ms, "cudaMemcpyAsync", ms)
            self.now = max(self.now, start + ms)
            self.wait("cudaStreamSynchronize")

    def pin(self, ms):
        """Pin a batch in the training thread."""
        with self.op("aten::pin_memory", ms):
            pass


# Trainings, and the fault of each --------------------------------------------------------------


def simulated(model, plant, functions=False, load_ms=0.1):
    """Return a training whose steps end with this."""
    machine = Machine(functions)
    for _ in machine.steps():
        machine.load(load_ms)
        machine.train(model)
        plant(machine)
    return machine


def synchronizes(apart):
    """Wait for the device twice in a step, with small work after it."""

    def plant(machine):
        for _ in range(2):
            machine.synchronize()
            machine.kernels("aten::add", TINY, apart)

    return plant


BALANCED = [
    (lambda m: m.print(8), "print"),
    (lambda m: m.print(60), "print"),
    (lambda m: m.norms(20), "item"),
    (lambda m: m.norms(160), "item"),
    (lambda m: m.pageable(2), "unpinned"),
    (lambda m: m.pageable(8), "unpinned"),
    (lambda m: m.load(10), "one-worker"),
    (lambda m: m.load(60), "one-worker"),
    (lambda m: m.sleep(8), "elsewhere"),
    (lambda m: m.sleep(30), "elsewhere"),
    (lambda m: m.empty_cache(8), "allocator"),
    (lambda m: m.empty_cache(50), "allocator"),
    (synchronizes(0.5), "waits"),
    (synchronizes(1), "waits"),
    (lambda m: m.pin(6), "copies"),
    (lambda m: m.pin(20), "copies"),
    (lambda m: m.item(), "none"),  # the loss, once
]
