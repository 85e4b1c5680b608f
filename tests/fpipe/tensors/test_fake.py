# SPDX-License-Identifier: Apache-2.0
"""What fake tensors say is what real ones are, where torch's own would refuse."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe.stages.graph.joint import Tape
from fpipe.tensors.effects import Effects
from fpipe.tensors.fake import META_KERNELS, Fakes, fake, fake_mode
from fpipe.tensors.layouts import LAYOUT_RULES
from fpipe.tensors.torch_private import VERSION
from schedules import one_f_one_b
from tests.common.sizes import sampled

aten = torch.ops.aten


def describe_grouped(a, b, offsets):
    """A grouped product and its gradients: shape, strides, dtype and device of each."""
    product = torch.nn.functional.grouped_mm(a, b, offs=offsets)
    grads = torch.autograd.grad(product, [a, b], torch.empty_like(product))
    return [(x.shape, x.stride(), x.dtype, x.device) for x in (product, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_grouped_products_of_any_dtype(dtype, turned):
    a = torch.randn(6, 16, dtype=dtype, requires_grad=True)
    b = torch.randn(3, *((24, 16) if turned else (16, 24)), dtype=dtype).transpose(1, 2 if turned else 1)
    arguments = a, b.requires_grad_(), torch.tensor([2, 3, 6], dtype=torch.int32)
    mode = fake_mode()
    assert describe_grouped(*map(mode.from_tensor, arguments)) == describe_grouped(*arguments)


def strides(function, tensors):
    """Of what a function returns, and of its gradients for cotangents that are laid out in rows, and that are not."""
    out = function(*tensors)
    turned = torch.empty_like(out).mT.contiguous().mT if out.dim() > 1 else torch.ones_like(out)
    for cotangent in (torch.empty_like(out).contiguous(), turned):
        for x in (out, *torch.autograd.grad(out, tensors, cotangent, retain_graph=True)):
            yield [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def normalised(x, scale, shift):
    return torch.batch_norm(x, scale, shift, None, None, True, 0.1, 1e-5, False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, *state: torch.layer_norm(x, (8,), *state),
        lambda x, *state: normalised(x.transpose(1, 2), *state),
        lambda x, *state: normalised(x.unflatten(1, (2, 3)).movedim(3, 1), *state),
        lambda x, *state: normalised(x[:, None].movedim(3, 1).transpose(2, 3), *state),
        lambda x, *state: torch.log_softmax(x + state[0] + state[1], -1),
        lambda x, *state: torch.softmax(x + state[0] + state[1], -1),
        lambda x, *state: 2.0 ** (x + state[0] + state[1]).mT,
        lambda x, *state: torch.nn.functional.mse_loss(x.mT + (state[0] + state[1])[:, None], torch.ones(2, 8, 6)),
    ],
)
def test_fake_results_have_the_layout_of_real_ones(function):
    tensors = [torch.randn(shape, requires_grad=True) for shape in [(2, 6, 8), (8,), (8,)]]
    mode = fake_mode()
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), requires_grad=True) for t in tensors]
        got = list(strides(function, fakes))
    assert got == list(strides(function, tensors))


LAYOUTS = {
    "rows": lambda dtype: torch.rand(2, 3, 4, dtype=dtype),
    "turned": lambda dtype: torch.rand(2, 4, 3, dtype=dtype).transpose(1, 2),
    "moved": lambda dtype: torch.rand(4, 2, 3, dtype=dtype).permute(1, 2, 0),
    "expanded": lambda dtype: torch.rand(2, 1, 4, dtype=dtype).expand(2, 3, 4),
    "with gaps": lambda dtype: torch.rand(2, 3, 8, dtype=dtype)[..., ::2],
}
OTHERS = {  # whose tensors are not of one shape, or come after a number
    aten.pow.Scalar,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm_backward.default,
}
REST = {  # what operations take after tensors
    aten.softplus_backward.default: (1, 20),
    aten.hardtanh_backward.default: (-1.0, 1.0),
    aten.logit_backward.default: (None,),
    aten.native_dropout_backward.default: (2.0,),
    aten.threshold_backward.default: (0.5,),
    aten.leaky_relu_backward.default: (0.1, False),
    aten.mse_loss_backward.default: (1,),
    aten.smooth_l1_loss_backward.default: (1, 1.0),
    aten.huber_loss_backward.default: (1, 1.0),
    aten.huber_loss.default: (0, 1.0),
    aten.smooth_l1_loss.default: (0, 1.0),
    aten.mse_loss.default: (0,),
    aten.soft_margin_loss_backward.default: (1,),
    aten.binary_cross_entropy_backward.default: (None, 1),
    aten._log_softmax_backward_data.default: (1, torch.float32),
}


BETWEEN = {aten.elu_backward.default: (1.0, 1.0, 1.0, False)}
"""What operations take between two tensors."""
POINTWISE = [
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.lt.Tensor),
    *(aten.atan2.default, aten.fmod.Tensor, aten.tanh_backward.default, aten.sigmoid_backward.default),
    *(aten.gelu_backward.default, aten.silu_backward.default, aten.addcmul.default, aten.lerp.Tensor),
]
"""Some of those that need a rule only for operands of reduced precision."""


def operands(operation):
    """How many tensors of one shape an operation takes first, or around others."""
    kinds = [str(argument.type) for argument in operation._schema.arguments]
    return 2 if operation in BETWEEN else next((k for k, kind in enumerate(kinds) if kind != "Tensor"), len(kinds))


@sampled(4)
@pytest.mark.parametrize("operation", [*(one for one in LAYOUT_RULES if one not in OTHERS), *POINTWISE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_results_have_the_layout_of_real_ones_for_any_operands(operation, dtype):
    mode, met = fake_mode(), 0
    for names in itertools.product(LAYOUTS, repeat=operands(operation)):
        first, *others = [LAYOUTS[name](dtype) for name in names]
        after = [dtype if one is torch.float32 else one for one in REST.get(operation, ())]
        rest = (*BETWEEN.get(operation, ()), *others, *after)
        with mode:
            fakes = operation(*[fake(mode, x, x.device) if isinstance(x, torch.Tensor) else x for x in (first, *rest)])
        try:
            real = operation(first, *rest)
        except RuntimeError:
            continue  # it takes some layouts or dtypes only
        met += 1
        real, fakes = (one if isinstance(one, tuple) else (one,) for one in (real, fakes))
        shown = [[(x.shape, x.stride(), x.dtype) for x in made if x.numel() > 8] for made in (fakes, real)]
        assert shown[0] == shown[1], names
    assert met or dtype is torch.bfloat16


class Gated(torch.nn.Module):
    """A gate, before softplus, of a sequence that is laid out by channels behind it."""

    def __init__(self):
        super().__init__()
        self.inner, self.gate, self.outer = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        gate = torch.nn.functional.softplus(self.gate(self.inner(x)))
        return self.outer((gate.transpose(1, 2).contiguous() * 2).cumsum(2).transpose(1, 2))


def test_a_channels_last_gradient_is_viewed_as_it_is():
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(4, 6, 8)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        loss=lambda out: out.square().mean(),
        schedule=one_f_one_b(ranks=2, microbatches=2),
        cuts=["gate"],
        gradients=fpipe.Gradients(backward="graph"),
    )
    assert fpipe.verify(pipe, model, (x,)).eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_expanded_tensor_is_copied_as_it_is_asked_for(dtype):
    """Attention with fewer heads of keys than of queries repeats them so."""
    mode, heads = fake_mode(), torch.rand(2, 4, 16, 8, dtype=dtype).transpose(1, 2)
    with mode:
        got = fake(mode, heads, heads.device)[:, :, None].expand(2, 16, 3, 4, 8).reshape(2, 48, 4, 8)
        copied = fake(mode, heads, heads.device)[:, :, None].expand(2, 16, 3, 4, 8).float()
    assert got.stride() == heads[:, :, None].expand(2, 16, 3, 4, 8).reshape(2, 48, 4, 8).stride()
    assert copied.stride() == heads[:, :, None].expand(2, 16, 3, 4, 8).float().stride()


class Spread(torch.nn.Module):
    """An expanded parameter, times a sequence that is laid out by channels."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, 8), torch.nn.Linear(48, 8)
        self.gate = torch.nn.Parameter(torch.randn(6))

    def forward(self, x):
        hidden = self.inner(x).transpose(1, 2)
        return self.outer((self.gate.expand(len(x), 8, 6) * hidden).reshape(len(x), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_expanded_operand_leaves_the_layout_to_the_other_in_any_precision(dtype):
    torch.manual_seed(0)
    model, x = Spread().to(dtype), torch.randn(4, 6, 8, dtype=dtype)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        loss=lambda out: out.square().mean(),
        schedule=one_f_one_b(ranks=2, microbatches=2),
        cuts=["outer"],
    )
    assert fpipe.verify(pipe, model, (x,)).eager


SHAPES = [(6, 8), (8,), (8,)]
ROWS = torch.arange(4).view(2, 2)
SAMPLES = {
    aten.view.default: lambda x, y, z: (x, [2, 3, 8]),
    aten.detach.default: lambda x, y, z: (x,),
    aten.t.default: lambda x, y, z: (x,),
    aten.transpose.int: lambda x, y, z: (x, 0, 1),
    aten.permute.default: lambda x, y, z: (x, [1, 0]),
    aten.unsqueeze.default: lambda x, y, z: (x, 1),
    aten.expand.default: lambda x, y, z: (x, [3, 6, 8]),
    aten.select.int: lambda x, y, z: (x, 1, 3),
    aten.slice.Tensor: lambda x, y, z: (x, 1, 2, 7, 2),
    aten._unsafe_view.default: lambda x, y, z: (x, [2, 3, 8]),
    aten.unbind.int: lambda x, y, z: (x, 1),
    aten.stack.default: lambda x, y, z: ([x, x], 1),
    aten.cat.default: lambda x, y, z: ([x, x * 2], 1),
    aten.clone.default: lambda x, y, z: (x.expand(3, 6, 8).mT,),
    aten.mm.default: lambda x, y, z: (x, x.t()),
    aten.bmm.default: lambda x, y, z: (x[None], x.t()[None]),
    aten.addmm.default: lambda x, y, z: (y, x, torch.ones_like(x).t().mm(x)),
    aten.sum.dim_IntList: lambda x, y, z: (x, [0], True),
    aten.mean.dim: lambda x, y, z: (x, [1]),
    aten.add.Tensor: lambda x, y, z: (x, y),
    aten.sub.Tensor: lambda x, y, z: (y, x),
    aten.mul.Tensor: lambda x, y, z: (x, 2),
    aten.div.Tensor: lambda x, y, z: (x, x),
    aten.rsqrt.default: lambda x, y, z: (x,),
    aten.mul.Scalar: lambda x, y, z: (x, 2.0),
    aten.div.Scalar: lambda x, y, z: (x, 3),
    aten.pow.Tensor_Scalar: lambda x, y, z: (x, 2),
    aten.neg.default: lambda x, y, z: (x,),
    aten.where.self: lambda x, y, z: (x > 0.5, y, x),
    aten.exp.default: lambda x, y, z: (x,),
    aten.sqrt.default: lambda x, y, z: (x,),
    aten.sin.default: lambda x, y, z: (x,),
    aten.cos.default: lambda x, y, z: (x,),
    aten.relu.default: lambda x, y, z: (x,),
    aten.threshold_backward.default: lambda x, y, z: (y.expand(6, 8), x, 0.0),
    aten.tanh.default: lambda x, y, z: (x,),
    aten.tanh_backward.default: lambda x, y, z: (y.expand(6, 8), x),
    aten.sigmoid.default: lambda x, y, z: (x,),
    aten.sigmoid_backward.default: lambda x, y, z: (x, x),
    aten.slice_backward.default: lambda x, y, z: (x, [6, 16], 1, 0, 8, 1),
    aten.mse_loss.default: lambda x, y, z: (x, x * 2, 0),
    aten.mse_loss_backward.default: lambda x, y, z: (y[0], x, x * 2, 1),
    aten.gelu.default: lambda x, y, z: (x,),
    aten.gelu_backward.default: lambda x, y, z: (x, x),
    aten.silu.default: lambda x, y, z: (x,),
    aten.silu_backward.default: lambda x, y, z: (x, x),
    aten.nll_loss_forward.default: lambda x, y, z: (x, (x[:, 0] * 0).long(), None, 1, -100),
    aten.nll_loss_backward.default: lambda x, y, z: (y[0], x, (x[:, 0] * 0).long(), None, 1, -100, z[0]),
    aten._log_softmax.default: lambda x, y, z: (x, 1, False),
    aten._log_softmax_backward_data.default: lambda x, y, z: (x, x, 1, x.dtype),
    aten._softmax.default: lambda x, y, z: (x, 0, False),
    aten._softmax_backward_data.default: lambda x, y, z: (x, x, 0, x.dtype),
    aten.embedding.default: lambda x, y, z: (x, ROWS),
    aten.embedding_dense_backward.default: lambda x, y, z: (x[:4].view(2, 2, 8), ROWS, 5, -1, False),
    aten.native_layer_norm.default: lambda x, y, z: (x, [8], y, z, 1e-5),
    aten.native_layer_norm_backward.default: lambda x, y, z: (x, x, [8], x[:, :1], x[:, :1], y, z, [True] * 3),
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda x, y, z: (*[x[None, None]] * 3, 0.0, True),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda x, y, z: (
        *[x[None, None]] * 5,
        x[None, None, :, 0].to(torch.promote_types(x.dtype, torch.float32)),
        0.0,
        True,
    ),
}


def test_every_kernel_has_a_sample():
    assert SAMPLES.keys() == META_KERNELS


@pytest.mark.parametrize("operation", SAMPLES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_kernels_for_meta_agree_with_real_ones(operation, dtype, turned):
    if VERSION < (2, 13) and dtype is torch.float64 and "flash_attention" in str(operation):
        pytest.skip("before torch 2.13, its own kernel for meta gets the dtype of the second result wrong")
    tensors = [torch.rand(shape, dtype=dtype) for shape in SHAPES]
    if turned:
        tensors[0] = tensors[0].t().contiguous().t()
    mode = fake_mode()
    fakes = [fake(mode, tensor, tensor.device) for tensor in tensors]

    def told(tensors):
        try:
            arguments = SAMPLES[operation](*tensors)
            out = operation(*arguments)
        except RuntimeError:
            return "refused"  # a view of what is laid out otherwise
        made = [x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, torch.Tensor)]
        memory = [any(x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in tensors) for x in made]
        steps = [[step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in made]
        return [(x.shape, s, x.dtype, x.device, m) for x, s, m in zip(made, steps, memory, strict=True)]

    with mode:
        got = told(fakes)
    assert got == told(tensors)


def test_fakes_are_made_as_torch_makes_them():
    mode, cpu, meta = fake_mode(), torch.device("cpu"), torch.empty(2, 3, device="meta").t()
    for _ in range(2):
        ours, torchs = mode.make(meta, cpu), FakeTensor(mode, meta, cpu)
        assert vars(ours) == vars(torchs)
        assert (ours.shape, ours.stride(), ours.device) == (torchs.shape, torchs.stride(), torchs.device)
        assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(torchs)
        assert vars(ours) is not vars(mode.make(meta, cpu))


@pytest.mark.parametrize("mode", [Fakes, Tape])
def test_torch_calls_modes_of_captures_directly(mode):
    """torch wraps `__torch_dispatch__` to turn its compiler off in there, which takes longer than many an operator."""
    assert hasattr(Told.__torch_dispatch__, "__wrapped__")
    assert mode.__torch_dispatch__ is vars(mode)["__torch_dispatch__"]
    assert not hasattr(mode.__torch_dispatch__, "__wrapped__")


def test_tensors_of_different_devices_are_refused():
    mode = fake_mode()
    here, there = (mode.make(torch.empty(2, 2, device="meta"), torch.device(name)) for name in ("cpu", "cuda:0"))
    with mode, pytest.raises(RuntimeError, match=r"[Dd]evice"):
        torch.mm(here, there)


@pytest.mark.parametrize(
    "function", [lambda x: x * 2, lambda x: x + x, lambda x: torch.cat([x, x]), lambda x: x.sum(0), torch.clone]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # in torch 2.11
def test_sparse_tensors_are_left_to_torch(function):
    def told():
        rows = torch.zeros(1, 3, dtype=torch.int64)
        out = function(torch.sparse_coo_tensor(rows, torch.ones(3, 4), (5, 4), check_invariants=False))
        return out.shape, out.dtype, out.layout

    with fake_mode():
        got = told()
    assert got == told()


class Told(TorchDispatchMode):
    """The operations that are called, as a mode above sees them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += [func] * (func is not torch.ops.prim.device.default)
        return func(*args, **(kwargs or {}))


def test_effects_are_those_of_the_called_operator():
    mode, effects, above = fake_mode(), Effects(), Told()
    called = []
    with mode.note(effects, lambda func, args, kwargs: called.append(func)), above:
        x = torch.empty(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
        y = torch.layer_norm(x, (4,)) @ torch.empty(4, 4, dtype=torch.bfloat16)
        torch.nn.functional.huber_loss(y, torch.zeros_like(y)).backward()
    with mode:
        torch.empty(2) + 1
    assert called == above.calls
    assert len(called) > 10


def test_statistics_of_a_norm_in_another_precision_than_its_weights_are_in_float32():
    """As under autocast. The fake kernel of torch has them in half, and stages would seem to keep less than they do."""
    tensors = torch.randn(6, 4, dtype=torch.bfloat16), *torch.rand(4, 4).unbind()
    real = torch.native_batch_norm(*tensors, True, 0.1, 1e-5)
    with fake_mode() as mode:
        made = torch.native_batch_norm(*[fake(mode, one, one.device) for one in tensors], True, 0.1, 1e-5)
    assert [one.dtype for one in made] == [one.dtype for one in real] == [torch.bfloat16, torch.float32, torch.float32]
