# SPDX-License-Identifier: Apache-2.0
"""The default front end: run a model on fake tensors, record a tape, and build the segments that stages run.

Everything here runs when a pipeline is built, and when a new kind of batch first comes. What it builds runs in every
step, from the parts in `fpipe.runtime.segments`. On the way from a model to a capture:

1. `fake_model` runs the model without its tensors; `settled_run` repeats that until a run does nothing new.
2. `patches` brings to the `recorder` what torch calls do not show; `call_stack`, `torch_calls`, `history`, `values`,
   `draws` and `reassignment` are what a recorder knows of a run. `recording` turns that into a tape.
3. `rehearsal` finds out which module calls do the same in their stage, by `replay` or by `comparison`.
4. `segment_builder` builds the function of a segment: `obstacles` says which calls cannot run as a whole, `operations`
   turns calls into operations.
"""
