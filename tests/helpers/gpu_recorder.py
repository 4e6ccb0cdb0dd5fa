"""What a step on fake CUDA launches, waits for, moves and holds: see fake_cuda.py.

Kernels are counted as PyTorch launches them in eager mode; what torch.compile or Triton makes of several counts as one.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import linecache
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

OUTSIDE = ("/megatron/", "/nemo/", "/transformer_engine_stand_in/", "/workers/")


class Site(NamedTuple):
    """The innermost line of the product behind an operation, of Megatron, NeMo or a test where none is."""

    file: str  # nemo_flashrl/..., or the path under site-packages
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def site(*, innermost: bool = False) -> Site:
    """The line behind what happens now; `innermost`: of the product, Megatron, NeMo or a test, whichever asked."""
    frame, outside = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if outside is None and any(p in name for p in OUTSIDE):
            outside = (re.sub(r".*/(site-packages|tests|helpers)/", "", name), name, frame.f_lineno)
            if innermost:
                break
        if "/nemo_flashrl/" in name:
            return _site(f"nemo_flashrl/{name.rsplit('/nemo_flashrl/', 1)[1]}", name, frame.f_lineno)
        frame = frame.f_back
    return _site(*outside) if outside else Site("?", 0, "?")


@functools.cache
def _site(file: str, path: str, line: int) -> Site:
    return Site(file, line, linecache.getline(path, line).strip())


class Answer(NamedTuple):
    """What a host sync finds, where the line that asks is of `file` and holds `text`; rows of a mask for a nonzero."""

    file: str
    text: str
    value: Any  # or a function of the tensor


class Event(NamedTuple):
    """One kernel, or a wait of the host ("sync"), in order."""

    name: str
    site: Site
    flops: int
    bytes: int


def covered_bytes(tensor: Any) -> int:
    """Distinct bytes under a tensor: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


# Operations that launch nothing.
QUIET = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"),
    *(
        "_unsafe_view",
        "is_pinned",
        "record_stream",
        "resize_",
        "set_",
        "_local_scalar_dense",
        "_has_compatible_shallow_copy_type",
    ),
}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
MASKED = ("index", "index_put", "index_put_", "_unsafe_index")
# Their results have sizes that values decide: the host waits.
SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")


@functools.cache
def _modes() -> tuple[type, type]:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    return FakeTensorMode, FakeTensor


def _no_modes() -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _recorder_class() -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __init__(self, recorder: Recorder) -> None:
            super().__init__()
            self.recorder = recorder

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            return self.recorder.dispatch(func, args, kwargs or {})

    return Dispatch


class Recorder:
    """Counts what happens within it. Tensors made within are fake, those of the host from numbers or outside are not.

    Args:
        answers: what host syncs find; the first that fits. A sync without one is an AssertionError that names its line.
        check: called with (name of the aten operation, arguments, options) before each: a kernel's own rules.
    """

    running: ClassVar[Recorder | None] = None

    def __init__(self, answers: Sequence[Answer] = (), check: Callable[[str, tuple, dict], None] | None = None) -> None:
        self.answers, self.check = answers, check
        self.fusing = False
        self._fused_flops = 0
        self.current = self.peak = 0  # bytes of storages on the device, as the allocator rounds them
        self.peak_site: Site | None = None
        self.holders: dict[Site, int] = {}  # at the peak, by where the storages came from; with `detailed`
        self.detailed = False
        self._live: dict[int, tuple[int, Any, Site]] = {}
        self.restart()

    def restart(self) -> None:
        """Count from here, with what is alive as the peak so far."""
        self.events: list[Event] = []
        self.syncs: collections.Counter[tuple[Site, str]] = collections.Counter()
        self.late_copies: collections.Counter[tuple[Site, str]] = collections.Counter()  # non_blocking ones
        self.collectives: collections.Counter[str] = collections.Counter()
        self.collective_bytes = 0
        self.peak = self.current
        self._tolist: tuple = ()

    def __enter__(self) -> Recorder:
        self._stack = contextlib.ExitStack()
        import torch

        self._mode = self._stack.enter_context(_modes()[0]())
        # The backward pass in this thread: modes belong to one.
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._stack.enter_context(_recorder_class()(self))
        Recorder.running = self
        return self

    def __exit__(self, *error: Any) -> None:
        Recorder.running = None
        self._stack.__exit__(*error)

    @property
    def launches(self) -> int:
        return sum(event.name != "sync" for event in self.events)

    def launches_by_site(self) -> collections.Counter[Site]:
        return collections.Counter(event.site for event in self.events if event.name != "sync")

    def dispatch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = _tensors((args, kwargs))
        real = [t for t in inputs if not isinstance(t, _modes()[1])]
        if real and len(real) == len(inputs) and not _to_device(kwargs):
            with _no_modes():  # tensors of the host that came from outside, or from numbers
                return func(*args, **kwargs)
        if real:
            args, kwargs = self._all_fake((args, kwargs))
            inputs = _tensors((args, kwargs))
        on_device = [t for t in inputs if t.device.type == "cuda"]
        for tensor in inputs:
            tensor.constant = None  # what a copy to the device would take along
        if self.check is not None and func.namespace == "aten":
            self.check(f"{name}.{func._overloadname}", args, kwargs)
        if name == "_local_scalar_dense":
            return self._answered("item", args[0])
        if name == "equal":
            return _same_place(*args) or self._answered("equal", args[0])
        if name in ("index_put", "index_put_") and _is_fill(args):
            name, func = "masked_fill_", _aten().masked_fill_.Scalar
            mask = args[1][0]
            args = (args[0], mask.reshape(*mask.shape, *[1] * (args[0].dim() - mask.dim())), 0)
        elif name in MASKED:
            args = (args[0], self._without_masks(args), *args[2:])
        elif name in SIZED_BY_VALUES and on_device:
            return self._sized(name, args)
        self._copies(name, args, kwargs, inputs)
        out = func(*args, **kwargs)
        outputs = [t for t in _tensors(out) if t.device.type == "cuda"]
        where = site()
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives[name] += 1
            self.collective_bytes += max(map(covered_bytes, on_device), default=0)
        elif self.fusing:
            self._fused_flops += _flops(name, args)
        elif (outputs or on_device) and name not in QUIET and not func.is_view:
            moved = _moved(name, args, kwargs, on_device, outputs)
            self.events.append(Event(name, where, _flops(name, args), moved))
        if not self.fusing:
            self._hold(outputs, where)
        return out

    def fused(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        where, inputs = site(), [t for t in _tensors((args, kwargs)) if t.device.type == "cuda"]
        self.fusing, self._fused_flops = True, 0
        try:
            out = function(*args, **kwargs)
        finally:
            self.fusing = False
        outputs = [t for t in _tensors(out) if t.device.type == "cuda"]
        self._hold(outputs, where)
        distinct = {id(t): t for t in (*inputs, *outputs)}.values()
        self.events.append(Event(function.__qualname__, where, self._fused_flops, sum(map(covered_bytes, distinct))))
        return out

    def _all_fake(self, tree: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map_only

        return tree_map_only(torch.Tensor, self._mode.from_tensor, tree)

    def _answered(self, kind: str, tensor: Any) -> Any:
        where = site(innermost=True)
        if tensor.device.type == "cuda":
            self._synced(where, kind)
        return self._answer(where, kind, tensor)

    def _answer(self, where: Site, kind: str, tensor: Any) -> Any:
        for answer in self.answers:
            if answer.file in where.file and answer.text in where.text:
                return answer.value(tensor) if callable(answer.value) else answer.value
        raise AssertionError(f"no answer for a host sync ({kind}, {tuple(tensor.shape)}, {tensor.dtype}) at {where}")

    def _synced(self, where: Site, kind: str) -> None:
        """Counted once for a list: torch asks a fake tensor for one element after another."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "tolist":
            frame = frame.f_back
        if frame is not None and self._tolist == (id(frame), where):
            return
        self._tolist = (id(frame), where) if frame is not None else ()
        self.syncs[where, kind] += 1
        self.events.append(Event("sync", where, 0, 0))

    def _sized(self, name: str, args: tuple) -> Any:
        import torch

        where = site(innermost=True)
        self._synced(where, name)
        rows = self._answer(where, name, args[0])
        self.events.append(Event(name, where, 0, covered_bytes(args[0])))
        if name == "nonzero":
            return torch.empty(rows, args[0].dim(), dtype=torch.int64, device=args[0].device)
        assert name == "masked_select", f"{name} at {where}"
        return torch.empty(rows, dtype=args[0].dtype, device=args[0].device)

    def _without_masks(self, args: tuple) -> list:
        """Indices with each boolean mask as the row numbers that it stands for."""
        import torch

        indices = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                if index is not None and index.dim() and index.device.type == "cpu" and args[0].device.type == "cuda":
                    self._synced(site(innermost=True), "to device")
                indices.append(index)
                continue
            where = site(innermost=True)
            if index.device.type == "cuda":
                self._synced(where, "mask")
                self.events += [Event("nonzero", where, 0, covered_bytes(index))] * 2
            rows = self._answer(where, "mask", index)
            indices += [torch.empty(rows, dtype=torch.int64, device=index.device) for _ in range(index.dim())]
        return indices

    def _copies(self, name: str, args: tuple, kwargs: dict, inputs: list) -> None:
        """torch waits for a copy between host and device unless it is told not to."""
        import torch

        if name == "_to_copy" and kwargs.get("device") is not None:
            source, target = args[0].device.type, torch.device(kwargs["device"]).type
            later = kwargs.get("non_blocking", False)
        elif name == "copy_":
            source, target = args[1].device.type, args[0].device.type
            later = kwargs.get("non_blocking", False) or len(args) > 2 and args[2]
        else:
            return
        if source != target:
            kind = "to device" if target == "cuda" else "to host"
            if later:
                self.late_copies[site(innermost=True), kind] += 1
            else:
                self._synced(site(innermost=True), kind)

    def _hold(self, outputs: list, where: Site) -> None:
        where = site(innermost=True) if self.detailed else where
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            size = -(-storage.nbytes() // 512) * 512
            self._live[key] = (size, weakref.ref(storage, functools.partial(self._freed, key)), where)
            self.current += size
            if self.current > self.peak:
                self.peak, self.peak_site = self.current, where
                if self.detailed:
                    self.holders = collections.Counter()
                    for held, _, origin in self._live.values():
                        self.holders[origin] += held

    def _freed(self, key: int, _: Any) -> None:
        self.current -= self._live.pop(key)[0]

    def report(self, most: int = 20) -> str:
        """What was counted, for a person."""
        lines = [f"launches {self.launches}, syncs {self.syncs.total()}, collectives {dict(self.collectives)}"]
        lines += [f"{n:7d} {kind:10s} {where}" for (where, kind), n in self.syncs.most_common(most)]
        lines += [f"{n:7d} launches   {where}" for where, n in self.launches_by_site().most_common(most)]
        lines += [f"peak {self.peak / 2**20:.1f} MiB at {self.peak_site}"]
        largest = sorted(self.holders.items(), key=lambda held: -held[1])[:most]
        return "\n".join([*lines, *(f"{size / 2**20:10.1f} MiB {where}" for where, size in largest)])


def _tensors(tree: Any) -> list:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _to_device(kwargs: dict) -> bool:
    return str(kwargs.get("device")).startswith("cuda")


def _aten() -> Any:
    import torch

    return torch.ops.aten


def _is_fill(args: tuple) -> bool:
    """`tensor[mask] = number`, which torch makes a masked fill of."""
    import torch

    masked = len(args[1]) == 1 and args[1][0].dtype == torch.bool
    return masked and args[2].numel() == 1 and args[2].device.type == "cpu"


def _same_place(one: Any, other: Any) -> bool:
    """torch says without a look that a tensor is equal to another view of the same numbers."""
    layouts = [(t.storage_offset(), t.dtype, t.shape, t.stride()) for t in (one, other)]
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and layouts[0] == layouts[1]


def _flops(name: str, args: tuple) -> int:
    if name not in PRODUCTS:
        return 0
    left, right = args[:2] if name in ("mm", "bmm") else args[1:3]
    return 2 * left.numel() * right.shape[-1]


def _moved(name: str, args: tuple, kwargs: dict, inputs: list, outputs: list) -> int:
    """Bytes that a kernel reads and writes; an operand in place is both."""
    written = sum(map(covered_bytes, {id(t): t for t in outputs}.values()))
    if name in ("fill_", "zero_", "new_zeros", "new_full", "new_ones", "zeros_like", "full_like", "ones_like"):
        return written
    if name == "copy_":
        return covered_bytes(args[0]) + covered_bytes(args[1])
    if name in ("index", "gather", "index_select", "embedding"):
        return 2 * written
    if name in ("scatter_", "scatter", "index_put_", "index_copy_"):
        return 3 * covered_bytes(args[2])
    if name == "index_add_":
        return 3 * covered_bytes(args[3])
    only_written = None if name in ("addmm", "baddbmm") and kwargs.get("beta", 1) else kwargs.get("out")
    if name in ("addmm", "baddbmm") and kwargs.get("beta", 1) == 0:
        inputs = [t for t in inputs if t is not args[0]]
    read = {id(t): t for t in inputs if t is not only_written}.values()
    return sum(map(covered_bytes, read)) + written


@dataclass(frozen=True)
class Clock:
    """One GPU on paper: figures of an H800, and what a launch and a wait cost the host."""

    tflops: float = 700.0
    tbytes: float = 3.35 * 0.85  # a second, of what it can
    host_us: float = 6.0  # a launch
    start_us: float = 3.0
    least_us: float = 2.5  # a kernel
    sync_us: float = 8.0


def two_clocks(events: Sequence[Event], clock: Clock = Clock()) -> dict[str, float]:
    """ms of wall time, of the GPU's work and of its products alone: the host runs ahead and a sync waits."""
    host = device = busy = floor = 0.0
    for event in events:
        if event.name == "sync":
            host = max(host, device) + clock.sync_us
            continue
        host += clock.host_us
        product = event.flops / (clock.tflops * 1e6)
        own = max(product, event.bytes / (clock.tbytes * 1e6), clock.least_us)
        device = max(device, host + clock.start_us) + own
        busy, floor = busy + own, floor + product
    return {"wall": max(host, device) / 1e3, "busy": busy / 1e3, "floor": floor / 1e3}


def walk(recorder: Recorder) -> Iterator[str]:
    """Sites of host syncs and how many of each kind, one a line."""
    for (where, kind), count in sorted(recorder.syncs.items()):
        yield f"{count} {kind} {where}"


def one_kernel(function: Callable) -> Callable:
    """`function` as a compiler fuses it: one launch, which reads its tensors and writes its results.

    What it forms on the way takes no memory.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        recorder = Recorder.running
        if recorder is None or recorder.fusing:
            return function(*arguments, **options)
        return recorder.fused(function, arguments, options)

    return call


def compile_as_one_kernel(function: Callable | None = None, **_: Any) -> Callable:
    return one_kernel(function) if function is not None else one_kernel
