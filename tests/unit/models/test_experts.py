"""Grouped experts against one expert at a time; the float32 router in a bfloat16 model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu

from disagmoe.models.experts import (
    PortableGptOssGroupedExperts,
    PortableGroupedExperts,
    add_gradients_in_place,
    portable_experts,
)
from disagmoe.models.router import float32_router

SIZES = {"dim": 16, "hidden_dim": 24, "num_experts": 4}
COUNTS = [[3, 0, 2, 1], [0, 0, 0, 0], [0, 5, 0, 0], [2, 2, 2, 2]]


def build(kind: type, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = kind.Config(**SIZES).build()  # type: ignore[attr-defined]
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


def one_at_a_time(module: nn.Module, x: Tensor, counts: list[int]) -> Tensor:
    outs = [x.new_zeros(0, SIZES["dim"])]
    p = dict(module.named_parameters())
    for e, rows in enumerate(x[: sum(counts)].split(counts)):
        if "w1_EFD" in p:
            outs.append((F.silu(rows @ p["w1_EFD"][e].T) * (rows @ p["w3_EFD"][e].T)) @ p["w2_EDF"][e].T)
        else:
            hidden = swiglu(rows @ p["mlp1_weight_EGD"][e].T + p["mlp1_bias_EG"][e])
            outs.append(hidden @ p["mlp2_weight_EDF"][e].T + p["mlp2_bias_ED"][e])
    return torch.cat(outs)


@pytest.mark.parametrize("kind", [PortableGroupedExperts, PortableGptOssGroupedExperts])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("tail", [0, 3])
def test_equal_to_one_expert_at_a_time(kind: type, counts: list[int], tail: int) -> None:
    module = build(kind)
    x = torch.randn(sum(counts) + tail, SIZES["dim"])
    x[sum(counts) :] = float("nan")  # unused rows of a buffer
    x.requires_grad_()
    out = module(x, torch.tensor(counts))[: sum(counts)]
    direction = torch.randn_like(out)
    grads = torch.autograd.grad(out, [x, *module.parameters()], direction)
    x_clean = x.detach().nan_to_num().requires_grad_()
    expected = one_at_a_time(module, x_clean, counts)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, [x_clean, *module.parameters()], direction, materialize_grads=True)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [PortableGroupedExperts, PortableGptOssGroupedExperts])
def test_gradients_added_in_place_are_autograds(kind: type) -> None:
    ours, plain = build(kind), build(kind)
    add_gradients_in_place(nn.Sequential(ours))
    for counts in COUNTS:
        x = torch.randn(sum(counts), SIZES["dim"])
        for module in (ours, plain):
            module(x, torch.tensor(counts)).square().sum().backward()
    for (name, own), (_, wanted) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(own.grad, wanted.grad, atol=2e-5, rtol=1e-4, msg=name)
    weights = [p for name, p in ours.named_parameters() if "bias" not in name]
    before = [p.grad.clone() for p in weights]
    seen = torch.autograd.grad(ours(x, torch.tensor(COUNTS[-1])).square().sum(), weights, allow_unused=True)
    assert seen == (None,) * len(weights), "autograd made a tensor of a weight's gradient"
    assert not any(torch.equal(p.grad, old) for p, old in zip(weights, before, strict=True)), "nothing was added"


def test_frozen_experts_get_no_gradient_in_place() -> None:
    module = build(PortableGroupedExperts)
    add_gradients_in_place(module)
    module.requires_grad_(False)
    x = torch.randn(8, SIZES["dim"], requires_grad=True)
    module(x, torch.tensor([2, 2, 2, 2])).sum().backward()
    assert x.grad is not None and all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("kind", "stock"), [(PortableGroupedExperts, GroupedExperts), (PortableGptOssGroupedExperts, GptOssGroupedExperts)]
)
def test_bfloat16_equals_torchtitans_own(kind: type, stock: type) -> None:
    module, other = build(kind, torch.bfloat16), build(stock, torch.bfloat16)
    x, counts = torch.randn(9, SIZES["dim"]).bfloat16(), torch.tensor([4, 0, 3, 2])
    out = module(x, counts)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), other(x, counts).float(), atol=3e-2, rtol=3e-2)
    assert module(x.float(), counts).dtype == torch.float32, "the input's dtype decides"


def test_configs_are_replaced_with_all_their_fields() -> None:
    init = {"w1_EFD": nn.init.ones_}
    config = portable_experts(GroupedExperts.Config(**SIZES, param_init=init))
    assert isinstance(config, PortableGroupedExperts.Config) and config.param_init == init and config.hidden_dim == 24
    assert portable_experts(config) is config
    oss = portable_experts(GptOssGroupedExperts.Config(**SIZES, swiglu_limit=3.0))
    assert isinstance(oss, PortableGptOssGroupedExperts.Config) and oss.swiglu_limit == 3.0
    with pytest.raises(ValueError, match="portable form"):
        portable_experts(nn.Module())  # type: ignore[arg-type]


def router_config(**changes: object) -> TokenChoiceTopKRouter.Config:
    from torchtitan.models.common.config_utils import make_router_config

    base = make_router_config(dim=16, num_experts=8, gate_param_init={"weight": nn.init.normal_}, top_k=2)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "changes", [{}, {"route_norm": True, "route_scale": 2.5}, {"num_expert_groups": 2, "num_limited_groups": 1}]
)
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_router_equals_torchtitans_own_in_float32(score_func: str, changes: dict[str, object]) -> None:
    config = router_config(score_func=score_func, **changes)
    stock, ours = config.build(), float32_router(config).build()
    nn.init.normal_(stock.gate.weight)
    ours.load_state_dict(stock.state_dict())
    x, bias = torch.randn(2, 5, 16), torch.randn(8) * 0.1
    for actual, expected in zip(ours(x, bias), stock(x, bias), strict=True):
        torch.testing.assert_close(actual, expected)


def test_router_computes_in_float32_under_bfloat16() -> None:
    router = float32_router(router_config(score_func="softmax")).build().bfloat16()
    nn.init.normal_(router.gate.weight)
    x = torch.randn(1, 64, 16).bfloat16()
    weights, _, scores = router(x)
    assert weights.dtype == scores.dtype == torch.float32
    torch.testing.assert_close(scores, (x.float() @ router.gate.weight.float().T).softmax(-1))
