# SPDX-License-Identifier: Apache-2.0
"""Inputs for vision towers that take images as rows of patches; all images in a batch have the same size.

The length of a patch is read from the first projection whose name contains "patch".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from sizes import PATCH, ROWS
from torch import Tensor, nn

GRID = 8  # patches per row and column of an image
Batch = dict[str, Any]


def towers(model: nn.Module, names: list[str]) -> Iterator[Batch]:
    """Yield patches for a forward that takes their grid or their positions, else nothing."""
    if "input_ids" in names:
        return
    if "pixel_position_ids" in names:
        yield from _positioned(model)
    if "target_sizes" in names:  # all patches share one row, so a microbatch is one row
        shape = (*_patch(model)[:-1], PATCH * GRID**2)
        yield {"pixel_values": torch.rand(2, *shape), "target_sizes": torch.full((2, 2), GRID, dtype=torch.int32)}
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in names), None)
    if grid is not None:
        extra = {"merge_sizes": torch.full((ROWS,), 2)} if "merge_sizes" in names else {}
        for patches in _packed(model):
            yield {names[0]: patches, grid: torch.tensor([[1, GRID, GRID]]).repeat(ROWS, 1), **extra}


def _packed(model: nn.Module) -> Iterator[Tensor]:
    """Yield the patches of all images: flat, shaped as the projection takes them, and with channels last."""
    shape = _patch(model)
    flat = torch.rand(ROWS * GRID**2, math.prod(shape))
    yield flat
    if len(shape) > 1:
        yield flat.unflatten(1, shape)
    yield torch.rand(ROWS * GRID**2, 2 * PATCH, 2 * PATCH, 3)


def _positioned(model: nn.Module) -> Iterator[Batch]:
    """Yield patches with the column and row of each, on grids that pool evenly by 2 and by 3."""
    for side in (GRID, 9):
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1).repeat(ROWS, 1, 1)
        yield {"pixel_values": torch.rand(ROWS, side**2, math.prod(_patch(model))), "pixel_position_ids": places}


def _patch(model: nn.Module) -> tuple[int, ...]:
    """Return the shape of one patch, as the projection takes it."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "patch" in name and isinstance(weight, Tensor) and weight.ndim > 1 and not isinstance(module, nn.Embedding):
            return tuple(weight.shape[1:])
    return (3, PATCH, PATCH)
