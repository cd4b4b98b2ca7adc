"""Other threads that run, read or copy a module while a solve swaps tensors into it."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, vmap
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.lifting.overlay import Overlay, replaced
from implicitkit.lifting.reach import below

D = torch.float64


class Map(nn.Module):
    """tanh(W z + x + b), slowly enough for another thread to get in between."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = wrap(nn.Linear(6, 6, dtype=D))
        self.register_buffer("b", torch.randn(6, dtype=D))
        self.owner = threading.get_ident()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if threading.get_ident() != self.owner:
            time.sleep(2e-4)  # in the solving thread, while its tensors are in place
        return torch.tanh(0.3 * self.lin(z) + x + self.b)


X = torch.linspace(-1, 1, 6, dtype=D)


def _solution(m: nn.Module, x: Tensor) -> Tensor:
    return ik.fixed_point(lambda z, x: m(z, x), torch.zeros(6, dtype=D), (x,)).value


def _backward(m: nn.Module) -> None:
    _solution(m, X).sum().backward()


def _over_batch(m: nn.Module) -> None:
    vmap(lambda x: _solution(m, x))(torch.stack([X, -X]))


def _gradient(m: nn.Module) -> None:
    grad(lambda x: _solution(m, x).sum())(X)


def _tangents(m: nn.Module) -> None:
    jacfwd(lambda x: _solution(m, x))(X)


def _nested(m: nn.Module) -> None:
    outer = ik.root(lambda y, x: y - _solution(m, 0.1 * y + x), torch.zeros(6, dtype=D), (X.clone().requires_grad_(),))
    outer.value.sum().backward()


SOLVES = {"backward": _backward, "vmap": _over_batch, "grad": _gradient, "jacfwd": _tangents, "nested": _nested}


def _beside(work: Callable[[], Any], look: Callable[[], None], seconds: float = 0.2) -> int:
    """``look`` on this thread for so long, while another thread repeats ``work``; how often that was done."""
    done, failed, stop = [], [], threading.Event()

    def run() -> None:
        try:
            while not stop.is_set():
                work()
                done.append(1)
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            look()
    finally:
        stop.set()
        thread.join()
    assert not failed, failed
    return len(done)


@pytest.mark.parametrize("name", SOLVES)
def test_another_thread_sees_the_module_as_it_is(name: str) -> None:
    m = Map()
    names = dict(m.named_parameters())
    want = m(X, X)

    def look() -> None:
        out = m(X, X)
        assert torch.equal(out, want)
        assert out.requires_grad
        assert all(names[k] is p for k, p in m.named_parameters())
        assert dict(m.state_dict(keep_vars=True)).keys() == {"lin.weight", "lin.bias", "b"}
        assert m.lin.weight is names["lin.weight"]

    assert _beside(lambda: SOLVES[name](m), look) > 0
    assert type(m.lin._parameters) is dict


@pytest.mark.parametrize("wrap", [spectral_norm, orthogonal])
def test_reparametrised_weights(wrap: Callable[[nn.Module], nn.Module]) -> None:
    m = Map(wrap).eval()
    want = m(X, X)

    def look() -> None:
        out = m(X, X)
        assert torch.equal(out, want)
        assert out.requires_grad

    assert _beside(lambda: _gradient(m), look) > 0


@pytest.mark.parametrize("mine", [None, lambda z: 1e-3 * torch.rand(3), lambda z: torch.dropout(z, 0.5, True)])
@pytest.mark.filterwarnings("error")
def test_numbers_that_another_thread_draws_are_not_the_functions(mine) -> None:
    done, x = threading.Event(), torch.linspace(-1, 1, 3)
    waits = threading.Thread(target=done.wait)  # a notebook has such threads
    waits.start()

    def f(z: Tensor, x: Tensor) -> Tensor:
        _elsewhere(lambda: torch.rand(1))
        return 0.3 * z.cos() + x + (mine(z) if mine else 0)  # dropout of zeros, at the start, is zero

    try:
        if mine:
            with pytest.raises(ik.ImpureFunctionWarning, match="draws random numbers"):
                ik.fixed_point(f, torch.zeros(3), (x,))
        else:
            y = x.clone().requires_grad_()
            z = ik.fixed_point(f, torch.zeros(3), (y,)).value
            (g,) = torch.autograd.grad(z.sum(), y)
            torch.testing.assert_close(g, 1 / (1 + 0.3 * z.detach().sin()))
    finally:
        done.set()
        waits.join()


def test_optimisers_and_copies_made_on_another_thread_hold_the_parameters() -> None:
    m = Map()
    names, copies = dict(m.named_parameters()), []

    def look() -> None:
        (group,) = torch.optim.SGD(m.parameters(), 0.1).param_groups
        assert {id(p) for p in group["params"]} == {id(p) for p in names.values()}
        copies.append(copy.copy(m.lin))
        assert copy.deepcopy(m).lin.weight.requires_grad

    assert _beside(lambda: _gradient(m), look) > 0
    for lin in copies:  # a shallow copy holds the dict that was there at that moment
        assert lin.weight is m.lin.weight
        assert dict(lin.named_parameters()).keys() == {"weight", "bias"}


def test_what_another_thread_writes_stays() -> None:
    m, count = Map(), [0]
    before = m.b

    def look() -> None:
        count[0] += 1
        m.lin.register_buffer("seen", torch.tensor(count[0]))
        m.b = m.b.clone()

    assert _beside(lambda: _gradient(m), look) > 0
    assert m.lin.seen.item() == count[0]
    assert m.b is not before


# ---------------------------------------------------------------------------------------------------- the dict of one thread
def _elsewhere(f: Callable[[], Any]) -> Any:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(f()))
    thread.start()
    thread.join()
    return got[0]


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda d: d["a"],
    "get": lambda d: d.get("a"),
    "get missing": lambda d: d.get("no", 7),
    "contains": lambda d: ("a" in d, "no" in d),
    "len": len,
    "iter": list,
    "reversed": lambda d: list(reversed(d)),
    "keys": lambda d: list(d.keys()),
    "values": lambda d: list(d.values()),
    "items": lambda d: list(d.items()),
    "copy": lambda d: d.copy(),
    "equal": lambda d: (d == {"a": 1, "b": 2}, d == {"a": 10, "b": 2}),
    "or": lambda d: (d | {"c": 1}, {"a": 0, "c": 1} | d),
    "repr": repr,
    "deepcopy": lambda d: (type(copy.deepcopy(d)), copy.deepcopy(d)),
}


@pytest.mark.parametrize("name", READS)
def test_a_dict_shows_its_entries_to_its_thread_alone(name: str) -> None:
    read, under = READS[name], {"a": 1, "b": 2}
    d = Overlay(under, {"a": 10})
    assert read(d) == read({"a": 10, "b": 2})
    assert _elsewhere(lambda: read(d)) == read({"a": 1, "b": 2})
    assert d.end() is under
    assert read(d) == read({"a": 1, "b": 2})


WRITES: dict[str, Callable[[Any], Any]] = {
    "new": lambda d: d.__setitem__("c", 3),
    "setdefault": lambda d: (d.setdefault("c", 3), d.setdefault("b", 9)),
    "update": lambda d: d.update({"c": 3}, b=4),
    "delete": lambda d: d.__delitem__("b"),
    "pop": lambda d: (d.pop("b"), d.pop("no", 5)),
    "popitem": lambda d: d.popitem(),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("own", [True, False])
def test_writes_to_other_entries_are_for_all(name: str, own: bool) -> None:
    write, under, want = WRITES[name], {"a": 1, "b": 2}, {"a": 1, "b": 2}
    d = Overlay(under, {"a": 10})
    expected = write(want)
    assert (write(d) if own else _elsewhere(lambda: write(d))) == expected
    assert under == want
    assert d.end() == want


def test_writes_to_replaced_entries_end_with_them() -> None:
    under = {"a": 1, "b": 2}
    d = Overlay(under, {"a": 10})
    d["a"] = 11
    assert d["a"] == 11
    assert under["a"] == _elsewhere(lambda: d["a"]) == 1
    del d["a"]
    assert "a" not in d
    d.clear()
    assert not d
    assert d.end() == {"a": 1}


def test_replaced_within_replaced() -> None:
    lin = nn.Linear(2, 2)
    w, first, second = lin.weight, torch.ones(2, 2), torch.zeros(2, 2)
    with replaced([(lin, "_parameters", "weight", first)]):
        with replaced([(lin, "_parameters", "weight", second)]):
            assert lin.weight is second
            assert _elsewhere(lambda: lin.weight) is w
        assert lin.weight is first
        assert _elsewhere(lambda: lin.weight) is w
    assert lin.weight is w
    assert type(lin._parameters) is dict


class _Hidden(nn.Module):
    """Names a module that is not in ``_modules``."""

    def __init__(self) -> None:
        super().__init__()
        self.others = (nn.Linear(1, 1),)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        yield from super().named_modules(memo, prefix, remove_duplicate)
        for i, m in enumerate(self.others):
            yield from m.named_modules(memo, f"{prefix}.{i}", remove_duplicate)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_below_a_module_stands_what_torch_says() -> None:
    shared = nn.Linear(1, 1)
    inner = nn.ModuleDict({"a": shared, "none": nn.Identity(), "b": nn.Sequential(shared, nn.Tanh())})
    inner["none"]._modules["absent"] = None
    loop = nn.Sequential(inner, shared, nn.ModuleList([nn.ReLU(), inner]), _Hidden())
    loop[2]._modules["back"] = loop
    for module in (shared, inner, loop, _Hidden(), torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1))):
        assert [id(m) for m in below(module)] == [id(m) for m in module.modules()]


class _Plain(Map):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.lin(z) + x + self.b)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler asks for it
@pytest.mark.parametrize("way", ["module", "function", "method"])
def test_dicts_of_compiled_modules_stay_plain(way: str) -> None:
    """The compiler looks into them, and would not compile what looks up the thread."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, m = CompileCounter(), _Plain()
    f: Any = m
    if way == "module":
        f = torch.compile(m, backend=counter)
    elif way == "function":
        f = torch.compile(lambda z, x: torch.tanh(0.3 * m.lin(z) + x + m.b), backend=counter, fullgraph=True)
    else:
        m.compile(backend=counter)
    ik.fixed_point(f, torch.zeros(6, dtype=D), (X,)).value.sum().backward()
    got, m.lin.weight.grad = m.lin.weight.grad, None
    assert counter.frame_count > 0
    z = torch.zeros(6, dtype=D)
    for _ in range(60):
        z = torch.tanh(0.3 * nn.functional.linear(z, m.lin.weight, m.lin.bias) + X + m.b)
    z.sum().backward()
    torch.testing.assert_close(got, m.lin.weight.grad, rtol=1e-6, atol=1e-9)


LOADING = """
import sys, threading
import torch
import implicitkit as ik

def solve():
    a = torch.tensor(2.0, requires_grad=True)
    ik.root(lambda z: z**2 - a, torch.tensor(1.0)).value.backward()

class Meanwhile:
    solver = None
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo.convert_frame" and self.solver is None:
            self.solver = threading.Thread(target=solve)
            self.solver.start()
            self.solver.join(5)

meanwhile = Meanwhile()
sys.meta_path.insert(0, meanwhile)
import torch._dynamo
meanwhile.solver.join(5)
print("solved" if not meanwhile.solver.is_alive() else "waits", torch._dynamo.eval_frame.skip_code.__name__)
"""


def test_a_solve_while_another_thread_loads_the_compiler() -> None:
    """``torch.func.grad`` does at its first call: two threads that each import a part of a package break that import."""
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["solved", "skip_code"] and not done.stderr, done.stdout + done.stderr


def test_fused_attention_is_as_it_was_after_two_threads() -> None:
    """Torch's switch of its kernels is one for all threads: each put it back to what the other had made of it."""
    fused = torch.backends.cuda.flash_sdp_enabled
    inside, both = threading.Event(), threading.Event()

    def first(z: Tensor) -> Tensor:
        inside.set()
        assert both.wait(60)
        return z

    def second(z: Tensor) -> Tensor:
        both.set()
        other.join(60)  # which leaves before this one does
        assert not fused()
        return z

    other = threading.Thread(target=autodiff.vjp, args=(first, X))
    other.start()
    assert inside.wait(60)
    autodiff.vjp(second, X)
    assert fused()
