# SPDX-License-Identifier: Apache-2.0
"""Find what a function reads and assigns in its bytecode: globals, variables that it closes over, attributes, keys.

A load that only feeds an update doesn't count as a read: `calls += 1` and `seen.append(x)` don't affect the result.

Idea. Reads are collected by name: `x.scale` reads the attribute `scale` of any object. Assignments say where they go:
`self.common.width = 3` assigns the `width` of what is found at `common` of the function's first argument. So a name
that is assigned to some object hides no change of another object's attribute.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
FREE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
STORING = frozenset({"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"})
COLLECTED = GLOBAL | FREE | ATTRIBUTE | STORING | {"LOAD_CONST"}
SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME", "COPY_FREE_VARS", "MAKE_CELL"})
NAMED, VARIABLES = frozenset(dis.hasname), frozenset(dis.haslocal + dis.hasfree)
SHIFTS = {"LOAD_GLOBAL": 1} | ({"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2} if sys.version_info >= (3, 12) else {})
"""The low bits of an argument that do not belong to the number of a name."""
AUGMENTING = range(13, 26)
"""The arguments of `BINARY_OP` in augmented assignments, such as `+=`."""
CHANGING = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "remove", "discard", "clear", "setdefault"}
)


class Lookup(NamedTuple):
    """An object that code finds: a variable, and the attributes looked up from there, one in the other.

    `root`: "global", "free", "first" (the function's first argument), or "" for an unknown object.
    """

    root: str
    variable: str = ""
    attributes: tuple[str, ...] = ()

    def then(self, name: str) -> Lookup:
        """Return the lookup of an attribute of the object."""
        return self._replace(attributes=(*self.attributes, name))


UNKNOWN, FIRST = Lookup(""), Lookup("first")


@dataclass(frozen=True)
class CodeNames:
    """The names that some code reads, and what it assigns to.

    - `outer`: the globals and free variables that it reads.
    - `attributes`: the attributes that it reads, of any object. `own`: those that it reads of its first argument.
    - `keys`: its strings, which may be keys of mappings.
    - `stored`: the attributes that it assigns to: the owner and the name. For a variable, the owner is empty, and its
      root says whether it is a global.
    - `grown`: the containers to which it adds elements, or whose elements it assigns.
    """

    outer: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    stored: set[tuple[Lookup, str]] = field(default_factory=set)
    grown: set[Lookup] = field(default_factory=set)

    def update(self, other: CodeNames) -> None:
        """Add the names of other code."""
        for name, found in vars(self).items():
            found |= vars(other)[name]


@lru_cache(maxsize=2**12)  # every pipeline of a process reaches the same library code
def find_names(code: CodeType) -> CodeNames:
    """Return the names that `code`, and the functions defined in it, read and assign.

    >>> def counting(self):
    ...     seen.append(table["key"])
    ...     self.calls += 1
    ...     return self.scale * factor
    >>> found = find_names(counting.__code__)
    >>> sorted(found.outer), sorted(found.attributes), sorted(found.keys)
    (['factor', 'table'], ['scale'], ['key'])
    >>> found.stored
    {(Lookup(root='first', variable='', attributes=()), 'calls')}
    """
    return _find(code, code.co_varnames[0] if code.co_argcount else "")


def _find(code: CodeType, first: str) -> CodeNames:
    """Return what `code` reads and assigns; `first` is the variable that holds the outermost function's argument."""
    found = _Reader(code, first).read()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inside = _find(inner, "" if first in inner.co_varnames else first)
            own = {*code.co_cellvars}  # what it does to variables of `code`, and to what they hold, is nobody else's
            stored = {(lookup, name) for lookup, name in inside.stored if not _is_in(own, lookup, name)}
            grown = {lookup for lookup in inside.grown if not _is_in(own, lookup)}
            found.update(replace(inside, stored=stored, grown=grown))
    return found


def _is_in(variables: Collection[str], lookup: Lookup, name: str = "") -> bool:
    """Return whether a lookup starts in one of these variables of the function around."""
    return lookup.root == "free" and (lookup.variable or name) in variables


class CodeStep(NamedTuple):
    """An instruction, its argument, and what that stands for: a name, the names of two variables, or a constant."""

    what: str
    argument: int = 0
    name: Any = None


NO_STEP = CodeStep("")


def steps_of(code: CodeType) -> Iterator[CodeStep]:
    """Yield the instructions of `code` that matter here, as `dis` reads them, but in a fifth of the time."""
    cells = [one for one in code.co_cellvars if one not in code.co_varnames]
    variables = (*code.co_varnames, *cells, *code.co_freevars)
    above = 0
    for number, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument, what = above | low, dis.opname[number]
        above = argument << 8 if number == dis.EXTENDED_ARG else 0
        if what in SKIPPED:
            continue
        name: Any = None
        if number in NAMED:
            name = code.co_names[argument >> SHIFTS.get(what, 0)]
        elif what == "LOAD_CONST":
            name = code.co_consts[argument]
        elif number in VARIABLES:
            is_pair = what.count("_FAST") > 1  # since Python 3.13
            name = (variables[argument >> 4], variables[argument & 15]) if is_pair else variables[argument]
        yield CodeStep(what, argument, name)


class _Reader:
    """Reads one code object; `first` is the variable that holds the first argument of the outermost function.

    `stack` is the top of Python's stack: how the code found each object there.
    """

    def __init__(self, code: CodeType, first: str) -> None:
        self.code, self.first = code, first
        self.found, self.outer = CodeNames(), Counter[str]()
        self.variables: dict[str, Lookup] = {}
        self.stack: list[Lookup] = []

    def read(self) -> CodeNames:
        """Return what the code reads and assigns, without the functions in it."""
        steps = [NO_STEP, *steps_of(self.code), NO_STEP]
        for before, step, after in zip(steps, steps[1:-1], steps[2:], strict=False):
            if step.what in COLLECTED:
                self._collect(before, step, after)
            self._follow(step)
        self.found.outer.update(name for name, count in self.outer.items() if count > 0)
        return self.found

    def _collect(self, before: CodeStep, step: CodeStep, after: CodeStep) -> None:
        """Add the names that a step reads, unless it only feeds an update."""
        what, _, name = step
        changing = after.what in ATTRIBUTE and after.name in CHANGING
        if what in GLOBAL or what in FREE:
            self.outer[name] += not changing
        elif what in ATTRIBUTE:
            if not changing and name not in CHANGING and before.what != "COPY":  # x.n += 1 copies x
                self.found.attributes.add(name)
                self.found.own.update([name] if self._top() == FIRST else [])
        elif what in STORING:
            if before.what == "BINARY_OP" and before.argument in AUGMENTING:
                self.outer[name] -= what != "STORE_ATTR"
        elif what == "LOAD_CONST" and isinstance(name, str) and after.what not in ("COPY", "STORE_SUBSCR"):
            self.found.keys.add(name)  # d["n"] += 1 copies d and "n"

    def _follow(self, step: CodeStep) -> None:
        """Do to the stack what a step does, and note what it assigns; forget the stack if the step does anything else.

        A method or function that is about to be called is one object here, although Python pushes two.
        """
        what, argument, name = step
        if what == "LOAD_FAST":  # the most frequent
            self.stack.append(FIRST if name == self.first else self.variables.get(name, UNKNOWN))
        elif what.startswith("LOAD_"):
            self._load(what, name)
        elif what.startswith("STORE_"):
            self._store(what, name)
        elif what == "COPY":
            self.stack.append(self._top(argument))
        elif what == "SWAP" and len(self.stack) >= argument:
            self.stack[-1], self.stack[-argument] = self.stack[-argument], self.stack[-1]
        elif what in ("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP"):
            self._pop(2)
            self.stack.append(UNKNOWN)
        elif what == "CALL":
            last = self._top()
            self._pop(argument)
            self.stack.append(self._call(self._pop(), last))
        else:
            self.stack.clear()

    def _load(self, what: str, name: Any) -> None:
        """Push what a step loads."""
        if what in GLOBAL:
            self.stack.append(Lookup("global", name))
        elif what in FREE:
            self.stack.append(FIRST if name == self.first else Lookup("free", name))
        elif what.startswith("LOAD_FAST"):  # some versions load two at once
            variables = name if isinstance(name, tuple) else (name,)
            self.stack += [FIRST if one == self.first else self.variables.get(one, UNKNOWN) for one in variables]
        elif what in ATTRIBUTE:
            self.stack.append(self._pop().then(name))
        elif what == "LOAD_CONST":
            self.stack.append(UNKNOWN)
        else:
            self.stack.clear()

    def _store(self, what: str, name: Any) -> None:
        """Note what a step assigns to."""
        if what == "STORE_SUBSCR":
            self._pop()
            self.found.grown.add(self._pop())
        elif what == "STORE_ATTR":
            self.found.stored.add((self._pop(), name))
        elif what in ("STORE_GLOBAL", "STORE_DEREF"):
            inside = name in self.code.co_cellvars
            self.found.stored.update([] if inside else [(Lookup("global" if what == "STORE_GLOBAL" else "free"), name)])
        elif what == "STORE_FAST":
            self.variables[name] = UNKNOWN if name in self.variables else self._top()  # which one depends on the way
        else:
            self.stack.clear()
        self._pop()

    def _call(self, function: Lookup, argument: Lookup) -> Lookup:
        """Return what a call returns, if it is known; note what it adds elements to."""
        if function == Lookup("global", "type"):
            return argument.then("__class__")
        if function.attributes and function.attributes[-1] in CHANGING:
            self.found.grown.add(function._replace(attributes=function.attributes[:-1]))
        return UNKNOWN

    def _top(self, depth: int = 1) -> Lookup:
        return self.stack[-depth] if len(self.stack) >= depth else UNKNOWN

    def _pop(self, count: int = 1) -> Lookup:
        """Remove so many objects from the stack, and return the last one removed."""
        last = UNKNOWN
        for _ in range(count):
            last = self.stack.pop() if self.stack else UNKNOWN
        return last
