# SPDX-License-Identifier: Apache-2.0
"""Strategies that draw descriptions of random models."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.common.random_models.description import GRAPH_NESTS, NESTS, Again, Description, Leaf, Nest, Part
from tests.common.random_models.kinds import KINDS

feeds = st.lists(st.integers(0, 9), max_size=2).map(tuple)


def leaves(kinds) -> st.SearchStrategy[Part]:
    rarely = st.sampled_from([False, False, False, True])
    new = st.builds(Leaf, st.sampled_from(kinds), feeds, rarely, rarely)
    return st.one_of(new, new, new, new, st.builds(Again, st.integers(0, 9), feeds))


def parts(kinds, nests) -> st.SearchStrategy[Part]:
    """Return a strategy for parts of these kinds, at most three levels deep."""
    found = leaves(kinds)
    for _ in range(2):
        some = st.lists(found, min_size=1, max_size=3).map(tuple)
        found = leaves(kinds) | st.builds(Nest, st.sampled_from(nests), some, feeds)
    return found


@st.composite
def descriptions(draw, graph: bool = False, sequence: bool = False) -> Description:
    """Draw a model; with `graph` one that any front end takes, with `sequence` an `nn.Sequential`."""
    kinds = [name for name, kind in KINDS.items() if kind.graph or not graph]
    kinds = [name for name in kinds if name != "noted"] if sequence else kinds
    some = draw(st.lists(parts(kinds, GRAPH_NESTS if graph else NESTS), min_size=2, max_size=4).map(tuple))
    return Description(
        some,
        draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple)),
        "tensor" if sequence else draw(st.sampled_from(["tensor", "tree", "loss"])),
        draw(st.booleans()),
        sequence,
    )
