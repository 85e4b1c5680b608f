# SPDX-License-Identifier: Apache-2.0
"""Say where two computations of a result part: at which action, at which operator.

Equal expressions have one number, so what only one side computed is known exactly. The first of these that a result is
made of is where its side went wrong: the other side computes the same operands, but doesn't combine them in this way.
If everything that the pipeline computed of a result is right, it left out something: the first that is missing.

Runs when `prove` finds a difference.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final, NamedTuple

from fpipe.verification.expressions import Expression, Expressions
from fpipe.verification.verify import PIPELINE

WITHOUT_OPERATOR: Final = frozenset(("value", "input", "scalar"))
"""The expressions that no operator makes: a window, an input or a constant, a number."""


class Unproved(NamedTuple):
    """A result that could not be proved.

    - `leaf`: the result, such as `gradient 0.weight`; `against`: what it was compared with.
    - `place`: the action at which the pipeline first computes something else, or the last one whose result is not used;
      empty if that is outside of its program. `operator`: what is computed there, or missing.
    - `why`: how the expressions differ, from there to the result.
    """

    leaf: str
    against: str
    place: str
    operator: str
    why: str

    def __str__(self) -> str:
        where = f"{self.place or 'outside of the program'}: {self.operator}; " if self.operator else ""
        return f"{where}{self.why}"


def find_difference(ledger: Expressions, leaf: str, against: str, mine: Expression, theirs: Expression) -> Unproved:
    """Return where the expressions of a result differ, in the pipeline and there."""
    meanings = [*ledger.numbers]
    why = _compare(meanings, mine, theirs)
    ours = _find_first(meanings, mine, ledger.computed.get(against, ()))
    missing = _find_first(meanings, theirs, ledger.computed.get(PIPELINE, ())) if ours is None else None
    if ours is not None:
        at, what = ours, f"{show(meanings[ours])} instead"
    elif missing is not None:
        used = [_maker(meanings, one) for one in operands(meanings[missing])]
        at = max([one for one in used if ledger.place(one)], default=missing)
        what = f"no {show(meanings[missing])} after it"
    else:
        at = _maker(meanings, mine)
        what = f"{show(meanings[at])} in its place"
    return Unproved(leaf, against, ledger.place(at), what, why)


def _find_first(meanings: Sequence[Any], result: Expression, known: Container[Expression]) -> Expression | None:
    """Return the first operator that a result is made by, and that is not known; `None` if there is none."""
    found, waiting, seen = None, [result], set[Expression]()
    while waiting:
        one = waiting.pop()
        if one in seen or one in known:
            continue
        seen.add(one)
        if meanings[one][0] not in WITHOUT_OPERATOR:
            found = one if found is None else min(found, one)
        waiting += operands(meanings[one])
    return found


def _compare(meanings: Sequence[Any], mine: Expression, theirs: Expression) -> str:
    """Return where two expressions begin to differ: the two that do, and operators from there to the result."""
    path, seen = list[str](), set[tuple[int, int]]()

    def differ(a: Expression, b: Expression) -> str:
        if a == b or (a, b) in seen:
            return ""
        seen.add((a, b))
        first, second = meanings[a], meanings[b]
        ours, others = (operands(one) for one in (first, second))
        if first[:1] == ("add",) == second[:1]:
            ours, others = [x for x in ours if x not in others], [x for x in others if x not in ours]
            ours.sort(key=lambda one: _name(meanings, one))
            others.sort(key=lambda one: _name(meanings, one))
        if first[0] != second[0] or len(ours) != len(others) or ours == others:
            return f"{show(first)}, and there {show(second)}"
        path.append(first[0])
        found = next(filter(None, (differ(x, y) for x, y in zip(ours, others, strict=True))), "")
        if not found:
            path.pop()
        return found

    found = differ(mine, theirs)
    return " of ".join([found, *[one for one in path[::-1] if one != "value"][:6]])


def operands(meaning: Any) -> list[Expression]:
    """Return the expressions of which one is made."""
    if meaning[0] == "value":
        return [one.source for one in meaning[1]]
    found: list[Expression] = []
    waiting = [meaning]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, tuple):
            if len(one) == 2 and one[0] == "tensor":
                found.append(one[1])
            else:
                waiting = [*one, *waiting]
    return found


def show(meaning: Any) -> str:
    """Return an expression in words, without its operands."""
    if meaning[0] == "value":
        return f"{str(meaning[2]).removeprefix('torch.')}{list(meaning[3])} of strides {list(meaning[4])}"
    if meaning[0] == "input":
        return f"an input of digest {meaning[1].hex()[:8]}" if isinstance(meaning[1], bytes) else f"input {meaning[1]}"
    if meaning[0] in ("scalar", "copy"):
        return f"a copy as {str(meaning[1]).removeprefix('torch.')}" if meaning[0] == "copy" else str(meaning[1])
    others = [f"{key}={_text(value)}" for key, value in meaning[2] if key != "operands" and "tensor" not in str(value)]
    return f"{meaning[0]}({', '.join(others)})" + (f" number {meaning[-1]}" if meaning[-1] else "")


def _text(value: Any) -> str:
    """Return an argument in words."""
    if not isinstance(value, tuple):
        return str(value)
    return str(value[1]) if len(value) == 2 and isinstance(value[0], str) else f"[{', '.join(map(_text, value))}]"


def _name(meanings: Sequence[Any], expression: Expression) -> str:
    """Return the name of the operator that made a value."""
    return str(meanings[_maker(meanings, expression)][0])


def _maker(meanings: Sequence[Any], expression: Expression) -> Expression:
    """Return the expression of which a value is a window, if it is one of one."""
    while meanings[expression][0] == "value" and len(meanings[expression][1]) == 1:
        expression = meanings[expression][1][0].source
    return expression
