# SPDX-License-Identifier: Apache-2.0
"""The function `fpipe.plan`.

Runs when it is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from inspect import signature
from itertools import product
from math import inf
from typing import Any, Final, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value
from fpipe.network.job import LocalJob, enter_job
from fpipe.pipelines.argument_checks import require_count
from fpipe.pipelines.builder import Model, make_batchings
from fpipe.pipelines.description import format_bytes
from fpipe.pipelines.options import Microbatching, gather_fields
from fpipe.planning.candidates import FACTORIES, PlanProblem, ScheduleFactory, list_factories
from fpipe.planning.choosing import PlanProgress, choose, say_progress
from fpipe.planning.kept import KeptFile
from fpipe.planning.plan import Plan
from fpipe.planning.profile import PROFILE_FORMAT, Profile
from fpipe.planning.profiler import profile as measure
from fpipe.record.front_ends.parts import as_module
from fpipe.record.objective import Loss
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.tree import flatten
from fpipe.weights.files import as_path
from schedules import Schedule, SizeError
from schedules.arguments import MOST_STAGES, each, takes
from schedules.status import showing

PER_RANK: Final = (1, 2, 4, 8)
Amount: TypeAlias = float | str
BYTES_BY_UNIT: Final[dict[str, int]] = {
    **{"": 1, "b": 1},
    **{f"{letter}b": 1000**k for k, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**k for k, letter in enumerate("kmgt", 1)},
}


@showing("plan")
def plan(
    model: Model,
    example: tuple[Any, ...] | dict[str, Any],
    targets: Any = None,
    *,
    ranks: int | DeviceMesh,
    loss: Loss | None = None,
    memory: Amount | Sequence[Amount] | None = None,
    microbatches: int | Iterable[int] | None = None,
    slices: int | Iterable[int] | None = None,
    schedules: Schedule | Iterable[Schedule | ScheduleFactory] | None = None,
    cuts: Iterable[str] = (),
    stages: Iterable[tuple[str | None, str | None]] = (),
    weights: float = 4.0,
    host: Amount = 0,
    profile: Profile | None = None,
    seconds: float = 60.0,
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Any,
) -> Plan:
    """Choose cuts, schedule, recomputation and number of microbatches for a model; return the `Plan`.

    The model is measured by `fpipe.profile`, once for each number of microbatches and slices; then schedules are
    simulated. In one process, no links are measured, and transfers take no time unless you pass `link`.

    - `model`, `example`, `targets`, `loss`: as for `fpipe.pipeline`. The batch is that of a whole step.
    - `ranks`: their number, or a mesh whose dimension `pp` has so many.
    - `memory`: the limit in bytes of a rank, or of each, such as "80GB"; without it, memory is not limited. A plan
      stays below the limit at every moment. `weights`: how often parameters are held: 4 for parameters, gradients and
      AdamW's moments.
    - `host`: the bytes per second at which a rank can move activations to its host and back, such as "25GB"; a plan may
      then offload if memory is short (`schedules.offload`). All stages have to be recorded.
    - `microbatches`: the numbers to try; by default those of the `schedules`, or 1, 2, 4 and 8 per rank, if the batch
      has enough rows.
    - `slices`: for a model with a carry, the numbers of slices of its sequence to try, such as `(1, 2, 4)`; 1 is for
      whole sequences. By default, those that `schedules` have.
    - `schedules`: the schedules to try: factories `(ranks, microbatches) -> Schedule`, or schedules.
    - `cuts`: names of modules at which a stage must begin. `stages`: pairs of names, for stages that must be: each
      begins at the first module and ends before the second. `None` stands for the beginning or end of the model.
    - `profile`: measured before, of this model, for one number of microbatches.
    - `seconds`: about the most time to search; `progress` is called with a `PlanProgress` after every candidate. A
      KeyboardInterrupt ends the search, and the best plan so far is returned.
    - `options`: more arguments of `fpipe.profile`, such as `recording`, `gradients`, `device`, `link` and `group`. With
      a `cache`, a folder, the plan is kept there, too: the same call finds it without a search. A search that was ended
      early, and one among schedules of your own, leave none.

    Under torch.distributed, every rank must call this, and all return the same plan, unless time runs out: so let one
    rank save its plan and the others read it.

    Raise `InputError` if nothing fits into the memory (it says how much would), and for arguments that contradict one
    another; otherwise as `fpipe.profile` does.

    >>> import torch, fpipe
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    >>> x = torch.ones(8, 8)
    >>> found = fpipe.plan(model, (x,), ranks=2, loss=torch.mean, microbatches=4, memory="1MB")
    >>> found.schedule.ranks, found.schedule.microbatches, max(found.predicted.memory) < 1e6
    (2, 4, True)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, plan=found)
    """
    given = {name: value for name, value in locals().items() if name not in ("schedules", "memory")}
    options = gather_fields(measure, options)
    with enter_job("plan") if profile is None else nullcontext(LocalJob()) as job:
        require_arguments(plan, given)
        _require_options(options)
        as_module(model)
        count = _count_ranks(ranks)
        cuts, stages = (tuple(each(name, given[name], object, InputError)) for name in ("cuts", "stages"))
        listed = _list_schedules(schedules, count)
        caps = parse_caps(memory, count)
        numbers = _read_microbatches(microbatches, listed, example, targets, count)
        _require_positive("weights", weights)
        speed = parse_bytes("host", host) if host else 0.0
        _require_positive("seconds", seconds)
        cut = _read_slices(slices, listed, count, numbers, profile)
        if profile is not None and len(numbers) != 1:
            raise InputError(
                f"microbatches: got {numbers} with a profile, expected one number: a profile is for microbatches of "
                "one size. Pass the number that it was measured for."
            )
        pins = {"cuts": cuts, "stages": stages}
        same = {"ranks": count, "memory": caps, "microbatches": numbers, "schedules": listed}
        same |= {"slices": cut, "weights": weights, "host": speed, "seconds": seconds}
        job.agree(lambda: [Field.of(name, describe_value(value)) for name, value in same.items()])
    if profile is not None:
        _require_profile_of(profile, model, example, targets, numbers[0], **options)
    problems = []
    if schedules is None:
        listed = list_factories(cut)
    for number, n in product(numbers, cut):
        found = profile or measure(model, example, targets, loss=loss, microbatches=number, slices=n, **options)
        problems.append(PlanProblem.of(found, number, caps, weights, speed).pin(cuts, stages))
    file = None
    if options.get("cache") is not None and schedules is None:
        profiles = [PROFILE_FORMAT.write(one.profile) for one in problems]
        file = KeptFile.of(as_path(options["cache"]), Plan, [*profiles, *describe_value({**same, **pins})])
        kept: Plan | None = file.find()
        if kept is not None:
            return kept
    chosen = choose(problems, listed, seconds=seconds, report=progress or say_progress, ordered=schedules is None)
    if file is not None and chosen.complete:
        file.keep(chosen)
    return chosen


def _require_options(options: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments that `profile` does not have."""
    for name in options:
        if name not in signature(measure).parameters:
            raise InputError(
                f"{name}: got an argument that neither fpipe.plan nor fpipe.profile has, expected one of theirs. "
                "Remove it, or correct its name."
            )


def _count_ranks(ranks: Any) -> int:
    """Return the number of ranks; raise `InputError` for a mesh without a dimension `pp`."""
    if not isinstance(ranks, DeviceMesh):
        require_count("ranks", ranks)
        if ranks > MOST_STAGES:
            raise InputError(f"ranks: got {ranks}, expected at most {MOST_STAGES}. Pass how many processes there are.")
        return int(ranks)
    if "pp" not in (ranks.mesh_dim_names or ()):
        raise InputError(
            f"ranks: got a mesh of the dimensions {ranks.mesh_dim_names}, expected one of them to be 'pp'. Name it, or "
            "pass the number of ranks."
        )
    return ranks["pp"].size()


def _list_schedules(schedules: Any, ranks: int) -> Sequence[Schedule | ScheduleFactory]:
    """Return the schedules and factories to choose from; raise `InputError` for anything else."""
    if schedules is None:
        return FACTORIES
    several = isinstance(schedules, Iterable) and not isinstance(schedules, Schedule) and not callable(schedules)
    listed = list(each("schedules", schedules, object, InputError)) if several else [schedules]
    for k, one in enumerate(listed):
        if not isinstance(one, Schedule) and not takes(one, 2):
            raise InputError(
                f"schedules[{k}]: got {one!r}, expected a schedule or a function (ranks, microbatches) that makes one. "
                "Pass, for example, one_f_one_b."
            )
        if isinstance(one, Schedule) and one.ranks != ranks:
            raise InputError(
                f"schedules[{k}]: got {one!r}, expected a schedule of {ranks} ranks, as many as `ranks` says. Change "
                "one of the two."
            )
    if not listed:
        raise InputError(
            "schedules: got none, expected at least one. Leave out the argument to try all built-in schedules."
        )
    return listed


def _read_microbatches(
    microbatches: Any, schedules: Sequence[Schedule | ScheduleFactory], example: Any, targets: Any, ranks: int
) -> list[int]:
    """Return the numbers of microbatches to choose from, ascending."""
    if microbatches is None:
        given = [one.microbatches for one in schedules if isinstance(one, Schedule)]
        if given:
            return sorted(set(given))
        rows = min((len(one) for one in flatten((example, targets))[0] if one.ndim), default=1)
        numbers = [ranks * k for k in PER_RANK if ranks * k <= rows]
        return numbers or [rows]
    numbers = _list_counts("microbatches", microbatches)
    if not numbers:
        raise InputError("microbatches: got none, expected at least one number. Leave the argument out for a choice.")
    return numbers


def _read_slices(
    slices: Any,
    schedules: Sequence[Schedule | ScheduleFactory],
    ranks: int,
    microbatches: Sequence[int],
    profile: Profile | None,
) -> list[int]:
    """Return the numbers of slices to choose from, ascending: by default those of the schedules, or of the profile."""
    if slices is None and isinstance(profile, Profile):
        return [len(profile.parts)]
    if slices is None:
        found = {1} if schedules is FACTORIES else set[int]()
        for one, number in product(schedules, microbatches) if not found else ():
            with suppress(SizeError):
                found.add(getattr(one if isinstance(one, Schedule) else one(ranks, number), "slices", 1))
        return sorted(found or {1})
    numbers = _list_counts("slices", slices)
    if not numbers or (isinstance(profile, Profile) and numbers != [len(profile.parts)]):
        known = f"{len(profile.parts)}, for which the profile is" if numbers and profile is not None else "at least one"
        raise InputError(f"slices: got {numbers}, expected {known}. Correct it, or leave it out.")
    return numbers


def _list_counts(name: str, given: Any) -> list[int]:
    """Return one number or several, ascending; raise `InputError` for anything but counts."""
    numbers = [given] if isinstance(given, int) else [*each(name, given, object, InputError)]
    for number in numbers:
        require_count(name, number)
    return sorted(set(numbers))


def _require_positive(name: str, number: float) -> None:
    if not 0 < number < inf:
        raise InputError(f"{name}: got {number!r}, expected a number above 0. Correct it.")


def parse_bytes(where: str, amount: Amount) -> float:
    """Return a number of bytes. Raise `InputError`, naming `where`, for anything but a number above 0.

    >>> parse_bytes("memory", "80GB"), parse_bytes("memory", "1.5 GiB")
    (80000000000.0, 1610612736.0)
    """
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", amount)
        if match and match[2].lower() in BYTES_BY_UNIT:
            return float(match[1]) * BYTES_BY_UNIT[match[2].lower()]
    elif isinstance(amount, int | float) and not isinstance(amount, bool) and 0 < amount <= inf:
        return float(amount)
    raise InputError(
        f'{where}: got {amount!r}, expected a number of bytes above 0, or a text such as "80GB" or "512 MiB". Correct '
        "it."
    )


def parse_caps(memory: Amount | Sequence[Amount] | None, ranks: int) -> tuple[float, ...]:
    """Return the bytes that each rank may hold; without a limit, infinity."""
    if memory is None:
        return (inf,) * ranks
    if isinstance(memory, str | int | float):
        return (parse_bytes("memory", memory),) * ranks
    if not isinstance(memory, Sequence):
        raise InputError(f"memory: got {memory!r}, expected a number of bytes, or one for each rank. Correct it.")
    caps = tuple(parse_bytes(f"memory[{rank}]", one) for rank, one in enumerate(memory))
    if len(caps) != ranks:
        raise InputError(f"memory: got {len(caps)} amounts, expected {ranks}: one for each rank. Correct it.")
    return caps


def _require_profile_of(
    profile: Profile,
    model: Model,
    example: Any,
    targets: Any,
    microbatches: int,
    *,
    microbatching: Microbatching = Microbatching(),
    **options: Any,
) -> None:
    """Raise `InputError`, naming what differs first, if a profile can't be of this model and batch.

    A plan for another model would run, and its predictions would be wrong. Compare what can be compared without
    capturing the model again: the batch, the class of the model, the modules at which blocks begin, and the bytes of
    all parameters. `Profile.require` compares every operation, but needs a pipeline.

    `options` are other arguments of `fpipe.profile`, which are ignored.
    """
    batching = make_batchings(example, targets, microbatching, microbatches, microbatches)[True]
    module, first = as_module(model), str(batching.split(batching.example)[0])
    held = sum({id(one): one.nbytes for one in module.parameters()}.values())
    known, blocks = {path for path, _ in module.named_modules()}, profile.blocks
    unknown = [mark.path for block in blocks for mark in block.marks if mark.path not in known]
    profiled = int(profile.ranges.parameters[0, len(blocks)])
    if not profile.microbatch.startswith(first):
        raise _differs("microbatch", profile.microbatch, f"{first}, the first of {microbatches}")
    if profile.model != type(module).__name__:
        raise _differs("model", profile.model, type(module).__name__)
    if unknown:
        raise _differs("blocks", f"one at the module {unknown[0]!r}", "modules that the model has")
    if profiled != held:
        raise _differs("parameters", format_bytes(profiled), f"{format_bytes(held)}, as the model has")


def _differs(field: str, got: object, expected: object) -> InputError:
    return InputError(
        f"profile.{field}: got {got}, expected {expected}: the profile is of another model, batch, or number of "
        "microbatches. Profile this one, or leave the profile out."
    )
