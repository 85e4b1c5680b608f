# SPDX-License-Identifier: Apache-2.0
"""The default front end: run a model on fake tensors, record a tape, and build the segments that stages run.

Everything here runs when a plan is made: once per kind of batch. The segments that it builds run in every step, from
the parts in `fpipe.record.trace`. From a model to a capture:

1. `fake_model` runs a copy of the model on fake tensors. `settled_run` runs it twice and keeps the second recording: by
   then the model has filled its caches and installed its hooks.
2. `recorder` records a run; `patches` reports to it what its torch function mode cannot see. `call_stack`,
   `torch_calls`, `history`, `values`, `draws` and `reassignment` hold its state. `recording` makes a tape of it.
3. `rehearsal` checks, by `replay` or `comparison`, which module calls do the same without the calls of other stages.
4. `segment_builder` builds the function of a segment: `obstacles` finds the calls that cannot run as a whole,
   `operations` turns calls into operations.
"""
