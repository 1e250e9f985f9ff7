"What stands in for the parts of `torch` that ask a driver, while a pretended machine is in use."
import contextlib
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

from esper_nb.grow import slots

from .graphs import CUDAGraph, graph
from .orders import Event, Stream
from .tensors import DeviceTensor, hidden

_low = {"linear", "conv1d", "conv2d", "bmm", "baddbmm", "addbmm", "matmul", "__matmul__", "mm", "addmm", "einsum",
        "lstm", "gru", "scaled_dot_product_attention"}
_high = {"layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "exp", "log",
         "pow", "sum", "prod", "cumsum", "norm", "softplus", "cosine_similarity", "binary_cross_entropy_with_logits"}


class Autocast(torch.overrides.TorchFunctionMode):
    "What autocast does on CUDA, for the functions that networks of this package call."
    def __init__(self, dtype, enabled):
        super().__init__()
        self.dtype, self.enabled = dtype, enabled

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        to = self.dtype if name in _low else torch.float32 if name in _high else None
        if not self.enabled or to is None: return func(*args, **kwargs)
        def cast(x):
            if isinstance(x, list | tuple): return type(x)(map(cast, x))
            fits = isinstance(x, DeviceTensor) and x.is_floating_point() and x.dtype not in (torch.float64, to)
            return x.to(to) if fits else x
        return func(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})


def _autocast(real):
    def autocast(device_type, dtype=None, enabled=True, cache_enabled=None):
        if torch.device(device_type).type != "cuda": return real(device_type, dtype, enabled, cache_enabled)
        return Autocast(dtype or torch.float16, enabled)
    return autocast


_made = weakref.WeakSet() # generators of devices

def of_device(generator):
    "Whether a generator, as PyTorch's core hands it on, is one of a device."
    return any(torch.equal(g.get_state(), generator.get_state()) for g in _made)


class _Generators(type(torch._C.Generator)): # noqa: SLF001
    def __instancecheck__(cls, x): return isinstance(x, torch._C.Generator) # noqa: SLF001


class Generator(torch._C.Generator, metaclass=_Generators): # noqa: SLF001
    "A generator that can say that it belongs to a device."
    def __new__(cls, device="cpu"):
        if torch.device(device).type == "cpu": return torch._C.Generator() # noqa: SLF001
        new = super().__new__(cls)
        new.place = torch.device(device).index or 0
        _made.add(new)
        return new
    @property
    def device(self): return torch.device("cuda", self.place)


def _lstm(x, hx, weights, *options):
    h, c = (t[0] for t in hx)
    w_x, w_h, b_x, b_h = weights
    out = []
    for x_t in x:
        gates = torch.nn.functional.linear(x_t, w_x, b_x) + torch.nn.functional.linear(h, w_h, b_h)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out), h[None], c[None]


def _gru(x, hx, weights, *options):
    h, out = hx[0], []
    w_x, w_h, b_x, b_h = weights
    for x_t in x:
        new = torch.nn.functional.linear(x_t, w_x, b_x).chunk(3, -1)
        old = torch.nn.functional.linear(h, w_h, b_h).chunk(3, -1)
        r, z = (new[0] + old[0]).sigmoid(), (new[1] + old[1]).sigmoid()
        h = (1 - z) * (new[2] + r * old[2]).tanh() + z * h
        out.append(h)
    return torch.stack(out), h[None]


def _attention(q, k, v, attn_mask=None, dropout_p=0., is_causal=False, scale=None, enable_gqa=False):
    score = q @ k.transpose(-1, -2) * (q.shape[-1]**-.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
        score = score.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        score = score.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else score + attn_mask
    return score.softmax(-1) @ v


def _only_there(stand_in, real):
    "The stand-in for tensors of the device, PyTorch's own for all others."
    def f(x, *args, **kwargs): return (stand_in if isinstance(x, DeviceTensor) else real)(x, *args, **kwargs)
    f.__name__ = stand_in.__name__.removeprefix("_").replace("attention", "scaled_dot_product_attention")
    return f


def _conversions(m):
    "`to`, `cuda` and the makers of tensors from lists, with devices in words that PyTorch's core needs no driver for."
    base, tensor, as_tensor = torch._C.TensorBase, torch.tensor, torch.as_tensor # noqa: SLF001
    def is_away(device):
        return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
    def word(x):
        if isinstance(x, torch.Tensor) or isinstance(x, torch.dtype | bool) or x is None: return x
        if isinstance(x, int): return hidden(x)
        return hidden(m.place_of(x)) if isinstance(x, str | torch.device) and is_away(x) else x
    def to(t, *args, **kwargs):
        if args and isinstance(args[0], torch.Tensor): # of whose device and type
            like = args[0]
            args = (hidden(like.place) if isinstance(like, DeviceTensor) else like.device, like.dtype, *args[1:])
        return base.to(t, *map(word, args), **{k: word(v) if k == "device" else v for k, v in kwargs.items()})
    def cuda(t, device=None, non_blocking=False, **kwargs):
        return to(t, hidden(m.place_of(device)), non_blocking=non_blocking)
    def new(data, *, device=None, requires_grad=False, pin_memory=False, **kwargs):
        if not is_away(device): return tensor(data, device=device, requires_grad=requires_grad, **kwargs)
        return to(tensor(data, **kwargs), device).requires_grad_(requires_grad) # made on the host: a wait
    def as_new(data, dtype=None, device=None):
        if isinstance(data, DeviceTensor) or is_away(device):
            data = data if isinstance(data, torch.Tensor) else as_tensor(data)
            return to(data, data.device if device is None else device, dtype or data.dtype)
        return as_tensor(data, dtype=dtype, device=device)
    def pin_memory(t, device=None): return m.pin(t.clone())
    return {torch.Tensor: dict(to=to, cuda=cuda, pin_memory=pin_memory), torch: dict(tensor=new, as_tensor=as_new)}


def _of_cuda(m):
    "`torch.cuda`."
    def with_machine(cls):
        if cls is Stream: return lambda device=None, priority=0, **_: Stream(m, m.place_of(device))
        return lambda enable_timing=False, **_: Event(m)
    def set_states(states):
        if m.graph is not None: m.graph.refuse("a generator's state")
        m.random[:] = [s.clone() for s in states]
    def seed(number, places): set_states([torch.Generator().manual_seed(number + 7919 * k).get_state()
                                          if k in places else s for k, s in enumerate(m.random)])
    modes = "default", "warn", "error"
    def set_mode(mode): m.sync_debug = modes[mode] if isinstance(mode, int) else mode
    class Generator:
        "Of a device, as far as a recording touches it."
        def clone_state(self): return self
        def graphsafe_set_state(self, state): m.stuck = False
    return dict(
        _lazy_init=lambda: None, is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: m.devices,
        _is_in_bad_fork=lambda: False, current_device=lambda: m.place_of(None), set_device=m.set_device,
        current_stream=m.current_stream, default_stream=lambda d=None: m.defaults[m.place_of(d)],
        stream=m.use_stream, Stream=with_machine(Stream), Event=with_machine(Event), synchronize=m.synchronize,
        is_bf16_supported=lambda including_emulation=True: m.bf16, get_device_capability=lambda d=None: (9, 0),
        get_device_name=lambda d=None: "pretended", mem_get_info=lambda d=None: m.memory,
        memory_allocated=lambda d=None: 0, max_memory_allocated=lambda d=None: 0,
        reset_peak_memory_stats=lambda d=None: None, memory_reserved=lambda d=None: 0, set_sync_debug_mode=set_mode,
        get_sync_debug_mode=lambda: modes.index(m.sync_debug), default_generators=(Generator(),) * m.devices,
        is_current_stream_capturing=lambda: m.current_stream().is_capturing(), CUDAGraph=CUDAGraph, graph=graph,
        graph_pool_handle=lambda: (0, 0), empty_cache=lambda: None, manual_seed=lambda s: seed(s, [m.place_of(None)]),
        manual_seed_all=lambda s: seed(s, range(m.devices)), get_rng_state_all=lambda: [s.clone() for s in m.random],
        set_rng_state_all=set_states, get_rng_state=lambda d="cuda": m.random[m.place_of(d)].clone(),
        set_rng_state=lambda s, d="cuda": set_states([s if k == m.place_of(d) else t for k, t in enumerate(m.random)]))


def _kept(made, key, make):
    "What a route keeps, it keeps by type, for the sake of tracers; a device's tensors are of a type of their own here."
    if key not in made: made[key] = make()
    return made[key]


def _in_threads(m):
    "Threads of pools see the machine, too."
    real = ThreadPoolExecutor.submit
    def submit(pool, f, *args, **kwargs):
        def inside():
            with m.mode(): return f(*args, **kwargs)
        return real(pool, inside)
    return submit


@contextlib.contextmanager
def in_place(m):
    "Put all stand-ins in, and take them out again."
    conversions = _conversions(m)
    tables = [(torch.cuda, _of_cuda(m)), (torch.accelerator, dict(current_stream=m.current_stream)), 
              *conversions.items(), (torch, dict(autocast=_autocast(torch.autocast), Generator=Generator)),
              (torch._VF, dict(lstm=_only_there(_lstm, torch._VF.lstm), gru=_only_there(_gru, torch._VF.gru))), # noqa: SLF001
              (torch.nn.functional, dict(scaled_dot_product_attention=_only_there(
                  _attention, torch.nn.functional.scaled_dot_product_attention))),
              (torch.Tensor, dict(is_pinned=lambda t, device=None: m.is_pinned(t))),
              (torch.backends.cudnn, dict(is_acceptable=lambda t: False)),
              *((sys.modules[k], dict(_foreach_supported_types=[torch.Tensor, torch.nn.Parameter, DeviceTensor]))
                for k in ("torch.optim.optimizer", "torch.utils._foreach_utils")),
              (sys.modules["torch.utils._foreach_utils"], dict(
                  _get_foreach_kernels_supported_devices=lambda: ["cuda", hidden(0).type])),
              (slots, dict(_kept=_kept)), (ThreadPoolExecutor, dict(submit=_in_threads(m)))]
    swap = torch.__future__.get_swap_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for owner, table in tables:
            for name, new in table.items(): stack.enter_context(mock.patch.object(owner, name, new, create=True))
        torch.__future__.set_swap_module_params_on_conversion(True) # a module's parameters stay the same objects
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        yield
