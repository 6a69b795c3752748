"""pytest plugin: FlashAttention's own suites, unchanged, against flashcore.compat.

It puts flashcore's modules in place of `flash_attn` and `flash_attn_interface`, leaves out the cases that
flash_attn_deselected.toml names, and draws a sample of the rest if asked to. The suites are not changed.

Forward only. FlashAttention 3's suite has a switch for that. FlashAttention 2's asks for gradients between computing the
output and asserting it: there, gradients that flashcore refuses are stand-ins, of which everything can be computed but no
question answered. The first assertion on one of them ends the case, which counts as `forward only`, never as passed, and
as failed unless the case has asserted its output before.

--on cpu: the suites say "cuda" everywhere; tensors are made on the CPU instead, and judged by the same references and
tolerances.
"""

from __future__ import annotations

import ast
import collections
import importlib.util
import inspect
import itertools
import os
import random
import sys
import textwrap
import types

import pytest
import torch

import flashcore
import flashcore.compat

try:
    import tomllib
except ImportError:  # before Python 3.11, where pytest needs it itself
    import tomli as tomllib

HERE = os.path.dirname(os.path.abspath(__file__))


def pytest_addoption(parser):
    group = parser.getgroup("flashcore")
    group.addoption("--suite", choices=["fa2", "fa3"], required=True, help="whose rules of flash_attn_deselected.toml")
    group.addoption("--checkout", required=True, help="folder of FlashAttention's repository")
    group.addoption("--on", choices=["cuda", "cpu"], default="cuda", help="where tensors that ask for cuda are made")
    group.addoption("--sample", type=int, default=0, help="cases of each test, and as many as cover values")
    group.addoption("--seed", type=int, default=0, help="seed of the sample")
    group.addoption("--largest", type=float, default=0, help="leave out cases of more products of query and key length")


def pytest_configure(config):
    if not config.getoption("--checkout"):
        return
    suite = Suite(config)
    config.pluginmanager.register(suite, "flashcore-suite")


# Tensors that ask for CUDA are made on the CPU


class OnCpu(torch.overrides.TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on CUDA, in factory functions and `to`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
        return function(*args, **kwargs)


def _is_cuda(device):
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _pretend_cuda():
    """Answers what the suites ask of a GPU as an H200 would; the memory is the host's."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=memory, major=9, minor=0)
    torch.cuda.synchronize = lambda device=None: None
    OnCpu().__enter__()


# Gradients that nothing may be concluded from


class GradientAsserted(Exception):
    """A case came to an assertion on a gradient."""


def _refuse(*args):
    raise GradientAsserted("gradients are not computed, and nothing can be asserted of them")


class Number(float):
    """A number that was computed from a stand-in: it can be printed and computed with, and not be compared."""

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = float.__hash__


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__abs__"):
    setattr(Number, _name, lambda *args, _of=getattr(float, _name): Number(_of(*args)))


class Gradient(torch.Tensor):
    """A stand-in for a gradient, full of NaN, as is everything that is computed from it."""

    QUESTIONS = (torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose, torch.Tensor.__bool__)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in cls.QUESTIONS:
            _refuse()
        result = super().__torch_function__(function, types, args, kwargs or {})
        return Number(result) if isinstance(result, float) else result


class Gradients:
    """`torch.autograd.grad` that gives stand-ins for gradients that flashcore refuses."""

    def __init__(self):
        self.original, self.is_refused = torch.autograd.grad, False

    def __call__(self, outputs, inputs, *args, **options):
        if not self.is_refused:
            try:
                return self.original(outputs, inputs, *args, **options)
            except flashcore.NoBackward:
                self.is_refused = True
        # Those of the references too, from here on: they could only be compared with ours.
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        return tuple(torch.full_like(x, float("nan"), requires_grad=False).as_subclass(Gradient) for x in inputs)


def _has_asserted_output(function, line):
    """True if an assertion on the output stands before `line`, in the block of that line or around it."""
    source, first = inspect.getsourcelines(function)
    block = ast.parse(textwrap.dedent("".join(source))).body[0].body
    line -= first - 1
    while block:
        before = [statement for statement in block if statement.end_lineno < line]
        for statement in before:
            if isinstance(statement, ast.Assert):
                if any(isinstance(node, ast.Name) and node.id == "out" for node in ast.walk(statement.test)):
                    return True
        inside = next((statement for statement in block if statement.lineno <= line <= statement.end_lineno), None)
        blocks = [getattr(inside, name, []) for name in ("body", "orelse")]
        block = next((inner for inner in blocks if inner and inner[0].lineno <= line <= inner[-1].end_lineno), None)
    return False


# The suite


def _rotary(checkout, is_cpu):
    """The suites' own rotary embedding, so that ours is not judged by itself."""
    for name in ("flash_attn.ops", "flash_attn.ops.triton", "flash_attn.layers"):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__path__ = []
    for name in ("flash_attn.ops.triton.rotary", "flash_attn.layers.rotary"):
        path = os.path.join(checkout, *name.split(".")) + ".py"
        if is_cpu and "triton" in name:
            module = types.ModuleType(name)
            module.apply_rotary = None  # its kernel
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        sys.modules[name] = module
    if not is_cpu:
        return
    turn = module.apply_rotary_emb_torch

    def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
        assert not inplace and cu_seqlens is None
        if isinstance(seqlen_offsets, int):
            seqlen_offsets = torch.full((x.shape[0],), seqlen_offsets)
        rows = [
            turn(x[b : b + 1].float(), *(table[at : at + x.shape[1]].float() for table in (cos, sin)), interleaved)
            for b, at in enumerate(seqlen_offsets.tolist())
        ]
        return torch.cat(rows).to(x.dtype)

    module.apply_rotary_emb = apply_rotary_emb


class Suite:
    def __init__(self, config):
        self.config, self.mode, self.gradients = config, config.getoption("--on"), Gradients()
        self.reasons, self.left_out, self.skipped, self.run = collections.Counter(), 0, 0, collections.defaultdict(set)
        self.values, self.emptied = collections.defaultdict(set), set()
        with open(os.path.join(HERE, "flash_attn_deselected.toml"), "rb") as file:
            rules = tomllib.load(file)["deselected"]
        suite = config.getoption("--suite")
        self.rules = [rule for rule in rules if suite in rule["suites"] and self.mode in rule.get("on", ["cpu", "cuda"])]
        flashcore.compat.install()
        if self.mode == "cpu":
            _pretend_cuda()
        _rotary(config.getoption("--checkout"), self.mode == "cpu")
        torch.autograd.grad = self.gradients

    def _rule(self, name, params):
        for rule in self.rules:
            if rule["test"] in (name, "*") and all(str(params.get(key)) == str(value) for key, value in rule.get("where", {}).items()):
                return rule
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc):
        """Leaves cases out before they become items: there are hundreds of thousands."""
        name = metafunc.function.__name__
        kept = []
        for call in metafunc._calls:
            rule = self._rule(name, call.params)
            if rule is None:
                kept.append(call)
            else:
                self.reasons[rule["reason"]] += 1
        skips = _skips(metafunc.function)
        left = [call for call in kept if not any(skip(call.params) for skip in skips)]
        self.skipped += len(kept) - len(left)
        kept = left
        largest, count = self.config.getoption("--largest"), self.config.getoption("--sample")
        for call in kept:
            for key, value in call.params.items():
                self.values[name].add((key, str(value)))
        if largest:
            small = [call for call in kept if _products(call.params) <= largest]
            self.left_out += len(kept) - len(small)
            kept = small
        if count and len(kept) > count:
            drawn = _sample(kept, count, random.Random(f"{self.config.getoption('--seed')} {name}"))
            self.left_out += len(kept) - len(drawn)
            kept = drawn
        if metafunc._calls and not kept:
            self.emptied.add(name)
        metafunc._calls[:] = kept

    def pytest_collection_modifyitems(self, items):
        kept = []
        for item in items:
            params = getattr(getattr(item, "callspec", None), "params", {})
            rule = None if params else self._rule(item.name, {})
            if item.name in self.emptied:
                continue  # no case of it is left, of which pytest makes one without parameters
            if rule is None:
                kept.append(item)
            else:
                self.reasons[rule["reason"]] += 1
        items[:] = kept

    def pytest_runtest_setup(self, item):
        self.gradients.is_refused = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if call.when != "call":
            return
        if call.excinfo is not None and call.excinfo.errisinstance(GradientAsserted):
            frames = [entry for entry in call.excinfo.traceback if entry.path == item.path]
            if frames and _has_asserted_output(item.function, frames[0].lineno + 1):
                report.outcome, report.longrepr, report.is_forward_only = "passed", None, True
        if report.outcome != "skipped":
            for key, value in getattr(getattr(item, "callspec", None), "params", {}).items():
                self.run[item.function.__name__].add((key, str(value)))

    def pytest_report_teststatus(self, report):
        if report.when == "call" and getattr(report, "is_forward_only", False):
            return "forward only", "f", "FORWARD ONLY"
        return None

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        write(f"flashcore {flashcore.__version__}, torch {torch.__version__}, tensors on the {self.mode}")
        write(f"cases that the suite itself skips: {self.skipped}; not drawn: {self.left_out}")
        for reason, count in self.reasons.most_common():
            write(f"deselected {count}: {reason}")
        for name, values in self.values.items():
            missing = sorted(values - self.run[name])
            if missing:
                write(f"{name}: no case ran of " + ", ".join(f"{key}={value}" for key, value in missing))


def _products(params):
    """Products of query and key length: what a case costs."""
    rows = params.get("seqlen_q", params.get("seqlen", 1))
    return float(rows) * float(params.get("seqlen_k", rows))


def _skips(function):
    """The conditions on parameters with which a test begins and skips itself, as functions of the parameters."""
    source, _ = inspect.getsourcelines(function)
    conditions = []
    for statement in ast.parse(textwrap.dedent("".join(source))).body[0].body:
        if not isinstance(statement, ast.If) or "pytest.skip(" not in ast.unparse(statement.body[0]):
            break
        code = compile(ast.Expression(statement.test), "condition", "eval")
        conditions.append(lambda params, code=code: bool(eval(code, function.__globals__, dict(params))))
    return conditions


SIZES = ("seqlen", "seqlen_q", "seqlen_k", "d")
POOL = 3000  # cases of a test that a sample is drawn from


def _sample(calls, count, generator):
    """Cases until every value is in one, and every three values that occur together, but for sizes; then any, up to `count`.

    Of all candidates, each time the one which covers most of what is missing for its cost.
    """
    pool = generator.sample(range(len(calls)), min(len(calls), POOL))
    values = {value for index in pool for value in _values(calls[index])}
    for index, call in enumerate(calls):
        if not values.issuperset(_values(call)):
            values.update(_values(call))
            pool.append(index)
    features = {}
    for index in pool:
        singles = _values(calls[index])
        others = [value for value in singles if value[0] not in SIZES]
        features[index] = {*singles, *itertools.combinations(others, 3)}
    costs = {i: 1e5 + _products(calls[i].params) * (64 + float(calls[i].params.get("d", 64))) for i in pool}
    missing, drawn = set().union(*features.values()), set()
    while missing:
        best = max(pool, key=lambda index: len(missing & features[index]) / costs[index])
        missing -= features[best]
        drawn.add(best)
    rest = [index for index in pool if index not in drawn]
    while len(drawn) < count and rest:
        index = min((generator.choice(rest) for _ in range(3)), key=costs.get)
        rest.remove(index)
        drawn.add(index)
    return [calls[index] for index in sorted(drawn)]


def _values(call):
    return [(key, str(value)) for key, value in sorted(call.params.items())]
