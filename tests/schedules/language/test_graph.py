# SPDX-License-Identifier: Apache-2.0
"""Stage graphs: edges run forwards, and both ends tell the same story."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Graph, GraphError, chain, dag
from schedules.testing import graphs


@given(st.integers(1, 12).flatmap(graphs))
def test_both_ends_of_an_edge_know_it(graph):
    stages = range(graph.stages)
    assert {(s, t) for s in stages for t in graph.feeds[s]} == graph.values
    assert {(s, t) for t in stages for s in graph.fed_by[t]} == graph.values
    assert {(s, t) for t in stages for s in graph.pulls[t]} == graph.cotangents
    assert {(s, t) for s in stages for t in graph.pulled_by[s]} == graph.cotangents
    assert {(s, t) for s in stages for t in graph.shares[s]} == graph.gradients
    assert {(s, t) for t in stages for s in graph.shared_by[t]} == graph.gradients


@given(st.integers(1, 12).flatmap(graphs))
def test_neighbours_come_in_stage_order(graph):
    for ends in (graph.feeds, graph.fed_by, graph.pulls, graph.pulled_by, graph.shares, graph.shared_by):
        assert all(list(row) == sorted(row) for row in ends)


@given(st.integers(1, 12).flatmap(graphs))
def test_graphs_are_values(graph):
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert eval(repr(graph)) == graph
    assert hash(pickle.loads(pickle.dumps(graph))) == hash(graph)


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (-1, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("what", ["values", "cotangents"])
def test_an_edge_that_runs_backwards_or_outside_is_refused(edge, what):
    edges = {name: frozenset({edge} if name == what else ()) for name in ("values", "cotangents")}
    with pytest.raises(GraphError, match=r"got edge \(.*\), expected \(s, t\) with 0 <= s < t < 3"):
        Graph(3, **edges)


@pytest.mark.parametrize("edge", [(1, 1), (-1, 1), (1, -1), (0, 3), (3, 2)])
def test_shared_gradients_go_either_way_between_different_stages(edge):
    assert Graph(3, frozenset(), frozenset(), frozenset({(0, 2), (2, 0)})).shares == ((2,), (), (0,))
    with pytest.raises(GraphError, match=r"got edge \(.*\) of gradients, expected two different stages below 3"):
        Graph(3, frozenset(), frozenset(), frozenset({edge}))


def test_chain_and_dag():
    assert chain(1) == Graph(1, frozenset(), frozenset())
    assert chain(3) == dag(3, {(0, 1), (1, 2)})
    assert dag(3, {(0, 2)}).pulled_by == ((2,), (), ())
