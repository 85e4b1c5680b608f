# SPDX-License-Identifier: Apache-2.0
"""The function `fpipe.profile`.

Runs when it is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.cutting.partition import CutsArgument, parse_places
from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value
from fpipe.network.job import JobProcesses, enter_job, resolve_group
from fpipe.network.ranks import Ranks
from fpipe.pipelines.batch import find_home
from fpipe.pipelines.builder import Model
from fpipe.pipelines.handshake import agree_on_arguments
from fpipe.pipelines.inputs import State
from fpipe.pipelines.modes import require_gradients, suspend_autocast
from fpipe.pipelines.options import Gradients, Microbatching, Recording, accept_fields
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step import make_training_step
from fpipe.planning.cut_model import (
    NO_TIMES,
    CutModel,
    ModelArguments,
    measure_blocks,
    take_alone,
    time_blocks,
    training_variant_here,
)
from fpipe.planning.holdings import BlockMemory, find_hops, find_parameters, join_hops
from fpipe.planning.kept import KeptFile
from fpipe.planning.profile import PROFILE_FORMAT, Profile
from fpipe.planning.ranges import add_times
from fpipe.planning.roofline import Roofline, calibrate
from fpipe.planning.timing import MESSAGE_SIZES, fit_link
from fpipe.record.front_ends.parts import as_module
from fpipe.record.objective import Loss
from fpipe.record.variant import TRAINING
from fpipe.tensors.arguments import require_arguments
from fpipe.weights.files import AnyPath, as_path
from fpipe.weights.loading import ValueSource
from schedules import Link, Span
from schedules.status import showing

STEPS: Final = 3
TIMED_AGREEMENTS: Final = 9
AGREEMENTS: Final = 2
"""In each step, before its first action and after its last."""


@accept_fields
@showing("profile")
def profile(
    model: Model | Pipeline,
    example: tuple[Any, ...] | dict[str, Any],
    targets: Any = None,
    *,
    loss: Loss | None = None,
    microbatches: int = 1,
    slices: int = 1,
    cuts: CutsArgument = None,
    microbatching: Microbatching = Microbatching(),
    recording: Recording = Recording(),
    gradients: Gradients = Gradients(),
    source: ValueSource | None = None,
    device: Roofline | None = None,
    link: Link | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    seconds: float = 3.0,
    cache: AnyPath | None = None,
) -> Profile:
    """Measure what each piece of a model costs, between all places where it may be cut; return the `Profile`.

    - `model`: a model as `fpipe.pipeline` takes it, or a pipeline. `example`, `targets`: a batch with values.
    - `slices`: the number of slices of each microbatch's sequence, for a model with a carry. The profile is then for
      schedules with so many: it has the time of whole microbatches, and what part of it each slice takes.
    - `cuts`: where stages may begin, as for `fpipe.pipeline`; by default wherever they can. Fewer places mean larger
      blocks, and a shorter table.
    - `source`: the values of parameters and buffers, as for `pipe.init`; by default those of the model.
    - `device`: the peaks of a device, to estimate times instead of measuring them. A model without values, on the meta
      device, and a pipeline without a `source` are never run: their times are estimated from peaks measured here.
    - `link`: the time of transfers between ranks, if it is known; the bytes in it are ignored.
    - `group`: under torch.distributed, the processes that profile a model together; by default all. A pipeline has its
      own.
    - `seconds`: about how long to time actions. Each runs a few times in any case.
    - `cache`: a folder in which profiles are kept. If it has one of the same model code, shapes and arguments, measured
      on such a machine with this version of fpipe, nothing is measured. Under torch.distributed, any rank's will do.
    - Other arguments are those of `fpipe.pipeline`, for a model; a pipeline has its own.

    The batch is cut into microbatches, and the first one is measured. Times are those of one process that runs alone on
    its device. They include what the executor adds to each action, and adding gradients to earlier ones; not the
    update, nor collectives of a mesh. The whole model must fit on the device, with the activations of two microbatches;
    otherwise, pass `device` to estimate times.

    Under torch.distributed, every rank must call this at the same time. Each measures on its own device, and the time
    of transfers between any two is measured, too. All return the same profile, in which the slowest rank counts.

    Raise `InputError` for a batch that the model can't take, for values that are missing, and for arguments that do not
    fit together; otherwise as `fpipe.pipeline` does.

    >>> import torch, fpipe
    >>> from schedules import gpipe, simulate
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> measured = fpipe.profile(model, (torch.ones(6, 4),), loss=torch.mean, microbatches=3, seconds=0)
    >>> [block.name for block in measured.blocks]
    ['0', '1', '2']
    >>> measured.sizes(["2"]).activation, measured.sizes(["2"]).weight
    ((64, 64), (160, 36))
    >>> simulate(gpipe(ranks=2, microbatches=3), measured.costs(["2"])).makespan > 0
    True
    """
    given = ModelArguments(loss, microbatches, slices, microbatching, recording, gradients)
    asked = Asked((example, targets), cuts, source, device, link, seconds, cache)
    if isinstance(model, Pipeline):
        with model.ranks.enter_call("profile"):
            _require_profile(locals())
            given.require_defaults()
            agree_on_arguments(model, **asked.describe())
            return _profile_together(model.ranks, take_alone(model, example, targets), asked)
    with enter_job("profile") as job:
        _require_profile(locals())
        module, same = as_module(model), {"slices": slices, **asked.describe()}
        job.agree(lambda: [Field.of("arguments", describe_value({"microbatches": microbatches, **same}))])
        ranks = _join(job, find_home(example, targets), group)
    with ranks.enter_call("profile"):
        alone = given.build(module, example, targets)
        is_whole = not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        values = module if source is None and is_whole else source
        return _profile_together(ranks, alone, asked._replace(source=values))


class Asked(NamedTuple):
    """The arguments of `profile`, beside the model."""

    batch: tuple[Any, Any]
    cuts: CutsArgument
    source: ValueSource | None
    device: Roofline | None
    link: Link | None
    seconds: float
    cache: AnyPath | None

    def describe(self) -> dict[str, object]:
        """Return what must be the same on every rank, since it decides on the messages that they exchange."""
        return {name: getattr(self, name) is not None for name in ("link", "device", "source", "cache")}


def _require_profile(given: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments of `profile` that nothing can be measured with."""
    require_arguments(profile, given)
    for name in ("microbatching", "recording", "gradients"):
        given[name].require()
    require_gradients()
    if given["cache"] is not None:
        as_path(given["cache"])
    if given["seconds"] < 0:
        raise InputError(f"seconds: got {given['seconds']}, expected a number of at least 0. Pass how long to measure.")


def _join(job: JobProcesses, device: torch.device, group: dist.ProcessGroup | DeviceMesh | None) -> Ranks:
    """Return this process's place among those that profile a model together."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(1)
    job.require_device(device, resolve_group(group))
    return job.join(dist.get_world_size() if group is None else group.size(), resolve_group(group), device)


def _profile_together(ranks: Ranks, alone: Pipeline, asked: Asked) -> Profile:
    """Return the profile that all ranks find together: that of the slowest, and the time of transfers between them."""
    model = _cut(alone, asked)
    file = None if asked.cache is None else _name_file(as_path(asked.cache), ranks, model, alone, asked)
    if file is not None and (kept := _find_kept(file, ranks)) is not None:
        return kept
    found = _profile_here(ranks, alone, model, asked)
    if file is not None:
        file.keep(found)
    return found


def _name_file(cache: Path, ranks: Ranks, model: CutModel, alone: Pipeline, asked: Asked) -> KeptFile:
    """Return the file of a profile of these blocks, measured so."""
    how = f"by {asked.device}" if asked.device else "measured" if asked.source is not None else "calibrated"
    lines = (
        f"{type(alone.model).__name__}, {_describe_microbatch(model)}, {how}, {_describe_device(alone.device)}",
        f"{asked.seconds} s, {len(ranks.processes)} processes, {asked.link}",
        *describe_value(alone.planner.backend),
        *[f"{block.marks} {block}" for block in model.blocks],
        *[str(block) for k in range(1, model.slices) for block in model.blocks_of(k)],
    )
    return KeptFile.of(cache, Profile, lines)


def _find_kept(file: KeptFile, ranks: Ranks) -> Profile | None:
    """Return the profile that the first of all ranks has kept, if any has, and all look for the same."""
    own = file.find()
    text = "" if own is None else PROFILE_FORMAT.write(own)
    rows = [row.split("\n", 1) for row in ranks.exchange_text(f"{file.digest}\n{text}", "profiles that are kept")]
    found = [Profile.parse(kept) for digest, kept in rows if kept and digest == file.digest]
    return found[0] if found and all(digest == file.digest for digest, _ in rows) else None


def _profile_here(ranks: Ranks, alone: Pipeline, model: CutModel, asked: Asked) -> Profile:
    """Return the profile that all ranks measure together."""
    found = _profile(alone, model, asked)
    if len(ranks.processes) > 1:
        found = found if asked.device is not None or asked.source is None else _add_messages(found, ranks)
        every = [Profile.parse(text) for text in ranks.exchange_text(PROFILE_FORMAT.write(found), "profiles")]
        found = every[0].merge(*every[1:])
    measured = fit_link(ranks.measure_transfers(MESSAGE_SIZES)) if asked.link is None else asked.link
    return replace(found, link=replace(measured, bytes=0, back=None))


def _add_messages(found: Profile, ranks: Ranks) -> Profile:
    """Return a measured profile with the times that this process spends on messages to other ranks.

    An action that receives and sends takes the time to post both; a step, that of the agreements before and after it.
    """
    posting, fixed = ranks.measure_posting(), found.fixed
    fixed = fixed._replace(F=fixed.F + posting, B=fixed.B + posting, I=fixed.I + posting, C=fixed.C + posting)
    return replace(found, fixed=fixed, step=found.step + AGREEMENTS * _time_agreement(ranks))


def _time_agreement(ranks: Ranks) -> float:
    """Return the median seconds that all ranks take to agree."""
    times = []
    for _ in range(1 + TIMED_AGREEMENTS):
        start = perf_counter()
        ranks.agree(about="the time that it takes to agree")
        times.append(perf_counter() - start)
    return median(times[1:])


def _cut(alone: Pipeline, asked: Asked) -> CutModel:
    """Return the blocks of a pipeline of one stage."""
    _require_plain(alone)
    variant, cuts = training_variant_here(), alone.captures.cuts
    split = alone.batch(variant, *asked.batch)
    alone.plan(variant, split.signature)
    return CutModel.of(alone.planner, variant, split, parse_places(asked.cuts, cuts.unsplittable, 1, cuts.whole))


def _describe_microbatch(model: CutModel) -> str:
    return str(model.planner.captures.batchings[True].split(model.batch.signature)[0])


def _profile(alone: Pipeline, model: CutModel, asked: Asked) -> Profile:
    """Return the profile of a pipeline of one stage, as this process finds it."""
    if asked.device is None and asked.source is not None:
        measured = measure_blocks(model, None)
        params, buffers = alone.init(asked.source)
        with suspend_autocast(TRAINING):
            times, fixed, slices = time_blocks(model, params, buffers, alone.device, asked.seconds)
        outside, where = _time_outside(alone, params, buffers, asked.batch), _describe_device(alone.device)
    else:
        roofline = asked.device or calibrate(alone.device, _main_dtype(alone))
        measured = measure_blocks(model, roofline)
        each = [[one.times for one in row] for row in measured]
        times, slices = (
            tuple(map(add_times, zip(*each, strict=True))),
            tuple(one.F + one.B for one in map(add_times, each)),
        )
        fixed, outside, where = NO_TIMES, 0.0, f"estimated by {roofline}"
    held = [BlockMemory.of(cut, [one.holdings for one in row]) for cut, row in zip(model.cuts, measured, strict=True)]
    return Profile(
        model=type(alone.model).__name__,
        microbatch=_describe_microbatch(model),
        backward=_describe_backward(model),
        device=where,
        blocks=model.blocks,
        times=times,
        fixed=fixed,
        step=outside,
        hops=join_hops(map(find_hops, model.cuts)),
        parameters=find_parameters(model.cuts[0]),
        slices=slices if len(slices) > 1 else (),
        **vars(BlockMemory.join(held)),
    )


def _require_plain(alone: Pipeline) -> None:
    """Raise `InputError` for a model with parameters that are split over a mesh."""
    if alone.training.placed:
        raise InputError(
            f"model: got parameters that are split over a mesh, such as {next(iter(alone.training.placed))!r}, "
            "expected plain ones. Profile the model before parallelize_module splits it."
        )


def _time_outside(alone: Pipeline, params: State, buffers: State, batch: tuple[Any, Any]) -> float:
    """Return the seconds of a step in one process outside of its actions: checks, splitting, collecting."""
    spans: list[Span] = []
    step, times = make_training_step(alone, TRAINING, spans.append), []
    for _ in range(1 + STEPS):
        spans.clear()
        start = perf_counter()
        step(params, buffers, *batch, seed=0)
        took = perf_counter() - start
        times.append(took - (max(one.end for one in spans) - min(one.start for one in spans)))
    return max(0.0, median(times[1:]))


def _main_dtype(alone: Pipeline) -> torch.dtype:
    """Return the dtype of most parameters."""
    count = Counter[torch.dtype]()
    for spec in alone.training.params.values():
        count[spec.dtype] += torch.Size(spec.shape).numel()
    found = [dtype for dtype, _ in count.most_common() if dtype.is_floating_point]
    return found[0] if found else torch.float32


def _describe_device(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"measured on {device} ({name}), torch {torch.__version__}"


def _describe_backward(model: CutModel) -> str:
    """Return how most blocks are differentiated."""
    remarks = Counter(stage.functions.remark or "by autograd" for stage in model.finest.assembly.stages)
    return remarks.most_common(1)[0][0]
