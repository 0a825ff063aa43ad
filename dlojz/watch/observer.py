"""The observer of any training program: our log of its steps, and the trace of a few.

What every training does, however it is written, gives the Chronometer's marks: a batch is asked of
a DataLoader, and comes; a module with weights is called that no other one calls;
`torch.autograd.backward` runs; an optimizer steps. A step is a batch of the loader that feeds the
training. Without a DataLoader it ends with an update, and the time up to the next forward pass
is that of its data. Several forward passes, or a turn of several optimizers, belong to one step.
Without an optimizer of torch, what follows a backward pass is the update.

The model is hooked itself, and nothing inside it: a compiled one has the same graphs as before.
Nothing waits for the device but the ends of measured windows: see `chronometer`.
"""

import gc
import math
import os
import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import wraps

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dlojz.runs import log
from dlojz.training import private
from dlojz.training.chronometer import Chronometer
from dlojz.watch import account

MEASURED = 12  # steps that are timed before some are profiled
TURN = 10  # updates by some optimizers, after which another one is no longer waited for
SCHEDULE = {"wait": log.WARMUP_STEPS + MEASURED, "warmup": 1, "active": 2, "repeat": 1}


class Marks(Chronometer):
    """The marks of a program that knows nothing of them: any order is right."""

    FOLLOWS = dict.fromkeys(Chronometer.FOLLOWS, Chronometer.FOLLOWS.keys())

    def updated(self):
        """Note the end of an update: of the step, unless another mark of it follows."""
        self._ledger.may_end()


class Observer:
    """The marks of a process's deeds. Its log begins with the first training step."""

    def __init__(self):
        self.run = self.chrono = None
        self._model = None  # a weak reference to the one that is trained
        self._evaluated = None  # one to a module that may be, though in evaluation mode
        self._frozen = False  # the model trains in evaluation mode
        self._nudge = account.asked(account.NUDGE)  # before the first forward pass
        self._loader = None  # one to the loader that feeds it
        self._latest = None  # one to the loader whose batch came last
        self._steps = self._epoch = 0
        self._values, self._optimizers, self._lr = {}, [], math.nan
        self._shape = ()  # of the model's first input
        self._batch, self._given = {}, Counter()  # what a loader gave, and what models were given
        self._counted = False  # the images of the next backward pass
        self._waited = 0  # updates since the last optimizer's, of those that take turns
        self._trained = False  # the present step has a backward pass
        self._closure = False  # the present step of an optimizer began before one
        self._by_hand = None  # the program updates its weights itself, without an optimizer
        self._accounts, self._account = account.asked(account.VARIABLE), account.Account()
        self._last = account.asked(account.LAST)
        self._finding = None  # a hook on all modules, until the model is found
        self._find()

    # Events ----------------------------------------------------------------------------------

    def asked(self, loader):
        """Note that a loader is asked for its next batch."""
        if self.chrono is None or self._feeds() is not loader:
            return
        if self._trained:
            self._end_step()
        elif self.chrono.phase in ("idle", "validation"):
            self.chrono.next_iter()

    def came(self, loader, batch):
        """Note that a loader gave a batch."""
        self._latest, self._batch = weakref.ref(loader), sizes(batch)
        if self._accounts:
            self._account.batch(batch)
        if self.chrono and self._feeds() is loader:
            if self.chrono.phase == "data":
                self.chrono.transfer()
        elif not torch.is_grad_enabled():  # for an average of the model, or for what it wraps
            self._validates()

    def ended(self, loader):
        """Note that a loader has given its last batch."""
        if self.chrono and self._feeds() is loader:
            self._epoch += 1

    def called(self, model, args, kwargs):
        """Note a call of the model."""
        if not (model.training or (self._frozen and torch.is_grad_enabled())):
            return self._validates()
        if not torch.is_grad_enabled():
            return None
        if self._nudge:
            account.nudge(model)
            self._nudge = 0
        first = next(account.tensors((*args, *kwargs.values())), None)
        self._loader = self._latest or self._loader
        chrono, without = self.chrono, self._feeds() is None
        ends = chrono and without and self._trained and chrono.phase == "update"
        if ends and not (self._closure or self._waited):
            self._end_step()
        if not self._counted:  # else a part of the model, or another view of the images
            self._given.update(sizes(first))
            self._counted = True
        if self._accounts:
            self._account.forward(first)
        if chrono is None:
            self._shape = first.shape if first is not None else ()
            return None
        if self.chrono.phase in ("idle", "validation"):
            self.chrono.next_iter()
        if self.chrono.phase == "data":
            self.chrono.transfer()
        if self.chrono.phase != "update" or self._closure:
            self.chrono.forward()
        return None

    def scaled(self, loss):
        """Note a loss before a gradient scaler makes it larger."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._values["loss"] = loss.detach()

    def backward(self, tensors):
        """Note the begin of a backward pass: the log begins with the first one."""
        self._counted = False
        if self._model is None and self._evaluated and (module := self._evaluated()):
            self._take(module)
            self._frozen, self._loader = True, self._latest
        if self.chrono is None and self._model and self._model():
            self._begin(self._model())
        if self.chrono is None:
            return
        self._account.counts["backwards"] += 1
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if "loss" not in self._values:
            self.scaled(loss)
        if self.chrono.phase in ("data", "transfer"):  # by a model that is not known yet
            self._find()
        if self.chrono.phase != "validation":
            self._trained = True
            self.chrono.backward()

    def passed(self):
        """Note the end of a backward pass, where an update follows of which nothing is seen."""
        if self._by_hand is None:
            self._by_hand = not any(issubclass(type(it), Optimizer) for it in gc.get_objects())
        if self._trained and (self._closure or self._by_hand):  # a closure's optimizer now steps
            self.chrono.update()

    def steps(self, optimizer):
        """Note that an optimizer begins to step."""
        self._by_hand = False
        if self._trained:
            self.chrono.update()
        else:
            self._closure = True

    def stepped(self, optimizer):
        """Note that an optimizer has stepped."""
        self._closure = False
        if self.chrono is None:
            return
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self.run.program(*self._place, self._optimizers)
        if self._accounts:
            self._account.update(optimizer)
        if optimizer is self._optimizers[0]:
            self._lr = float(optimizer.param_groups[0]["lr"])
        if self._feeds() is None:
            self.chrono.updated()
            self._waited = 0 if optimizer is self._optimizers[-1] else self._waited + 1
            if self._waited == TURN:
                self._optimizers, self._waited = [optimizer], 0

    # The log ---------------------------------------------------------------------------------

    def _begin(self, model):
        weights = list(model.parameters())
        device = next((w.device for w in weights if w.requires_grad), torch.device("cpu"))
        what = {"model": type(_inside(model)).__name__}
        if images := (self._batch or self._given).get("images"):
            what["batch_size"] = images
        if len(self._shape) == 4:
            what["image_size"] = self._shape[-1]
        self.run = log.open_run(Namespace(**what), quiet=True)
        self._place = device, weights
        self.run.program(device, weights)
        self.chrono = Marks(device, self.run)
        if not (private.is_profiling() or self._accounts):  # one profiler at a time
            # Else CUPTI slows each launch until the program ends: pytorch/pytorch/pull/146604.
            os.environ.setdefault("TEARDOWN_CUPTI", "1")
            self.chrono.profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(**SCHEDULE),
                on_trace_ready=self.run.save_trace,
                acc_events=True,  # only avoids a warning: there is one cycle
            )
            self.chrono.profiler.start()
        self.chrono.start()
        for mark in (self.chrono.next_iter, self.chrono.transfer, self.chrono.forward):
            mark()  # late, but the first step is not measured

    def _end_step(self):
        if self.chrono.phase != "update":  # more batches belong to the next update
            self.chrono.update()
        place = {"epoch": self._epoch, "step": self._steps}
        if self._steps < self._accounts:
            model = self._model and self._model()
            found = self._account.closed(model, self._values.get("loss"))
            self.run.case(f"{log.ACCOUNTED}{self._steps}", **found)
        else:
            self._accounts = 0
        self._account = account.Account()
        given = (self._feeds() is not None and self._batch) or self._given
        values = {"images": 0, "lr": self._lr, "loss": math.nan} | given | self._values
        self.chrono.next_iter(**place, **values)
        self._steps += 1
        self._given, self._values, self._trained = Counter(), {}, False
        if self.chrono.profiler:
            self.chrono.profiler.step()
        if self._steps == self._last:  # as if the program ended here: its `finally` clauses run
            self.end()
            raise SystemExit

    def _validates(self):
        if self.chrono is None or self.chrono.phase in ("validation", "transfer", "forward"):
            return  # not begun, or a teacher's part in a training step
        if self._trained:
            self._end_step()
        self.chrono.validation()

    def flush(self):
        """Hand over the steps so far: an error ends the program."""
        if self.chrono:
            with suppress(RuntimeError):  # of a device that is no more
                self.chrono.stop()

    def end(self, well=True):
        """End the log of a program that has ended; once."""
        global OBSERVER
        if self.chrono and OBSERVER is self:
            OBSERVER = None
            if self._trained and well:
                self._end_step()
            self.flush()
            if well:
                self.run.end()
            else:
                self.run.fail("the program ended with an exit code that is not 0")

    # The model -------------------------------------------------------------------------------

    def _feeds(self):
        return self._loader and self._loader()

    def _find(self):
        """Hook all modules until one is called to train: the model."""
        if self._finding is None:
            hook = torch.nn.modules.module.register_module_forward_pre_hook
            self._finding = hook(torch.compiler.disable(self._found))

    def _found(self, module, args):
        if not torch.is_grad_enabled() or not any(w.requires_grad for w in module.parameters()):
            return
        if not module.training:  # unless a backward pass comes first, only evaluated
            self._evaluated = self._evaluated or weakref.ref(module)
            return
        if self._take(module):
            self.called(module, args, {})

    def _take(self, module) -> bool:
        """Take a module for the model, and hook it; return whether it is another one."""
        self._finding.remove()  # before the modules inside are called
        known, self._finding, self._model = self._model, None, weakref.ref(module)
        if known and known() is module:
            return False  # its own hook follows
        if not private.before_compiled_call(module, on_call):
            hook = module.register_forward_pre_hook(on_call, with_kwargs=True)
            private.leave_out(hook, module)
        return True

    def entered(self, module, args, kwargs):
        """Note a call of a hooked module, which may be a copy of the model."""
        if self._model and self._model() is module:
            self.called(module, args, kwargs)


def on_call(module, args, kwargs):
    """Tell the observer of a call: a function, so that a class's own way to copy can take it."""
    if OBSERVER:
        OBSERVER.entered(module, args, kwargs)


OBSERVER = None


def observe() -> Observer:
    """Return an observer of this process, which begins now, by torch's own hooks."""
    global OBSERVER
    observer = OBSERVER = Observer()
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: observer.steps(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: observer.stepped(optimizer))
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale

    @wraps(backward)
    def noted(tensors, *args, **kwargs):
        observer.backward(tensors)
        backward(tensors, *args, **kwargs)
        observer.passed()

    @wraps(scale)
    def scaled(scaler, outputs):
        observer.scaled(outputs)
        return scale(scaler, outputs)

    torch.autograd.backward, torch.amp.GradScaler.scale = noted, scaled
    iterate = torch.utils.data.DataLoader.__iter__

    @wraps(iterate)
    def watched(loader):
        return Batches(observer, loader, iterate(loader))

    torch.utils.data.DataLoader.__iter__ = watched
    return observer


class Batches:
    """The batches of a loader, whose coming and going the observer notes."""

    def __init__(self, observer, loader, batches):
        self._observer, self._loader, self._batches = observer, loader, batches

    def __iter__(self):
        return self

    def __next__(self):
        self._observer.asked(self._loader)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._observer.ended(self._loader)
            raise
        self._observer.came(self._loader, batch)
        return batch

    def __len__(self):
        return len(self._batches)

    def __getattr__(self, name):
        return getattr(self._batches, name)


def sizes(batch) -> dict[str, int]:
    """Return the images of a batch, by its first tensor, and the tokens of one of whole numbers."""
    first = next((tensor for tensor in account.tensors(batch) if tensor.ndim), None)
    if first is None:
        return {}
    named = isinstance(batch, Mapping)
    parts = [*batch.values()] if named else batch if isinstance(batch, list | tuple) else [batch]
    if first.ndim == 3 and all(isinstance(part, list | tuple | Mapping) for part in parts):
        # Images of sizes of their own, as for the detection of objects: listed, or in samples.
        if all(isinstance(each, torch.Tensor) for each in parts[0]):
            return {"images": len(parts[0])}
        if not named:
            return {"images": len(parts)}
    tokens = {} if first.is_floating_point() or first.ndim != 2 else {"tokens": first.numel()}
    return {"images": len(first)} | tokens


def _inside(model):
    """Return the module inside of DDP's and the compiler's."""
    while inner := next(
        (getattr(model, n) for n in ("module", "_orig_mod") if hasattr(model, n)), None
    ):
        model = inner
    return model
