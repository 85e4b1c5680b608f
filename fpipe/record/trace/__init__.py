# SPDX-License-Identifier: Apache-2.0
"""The default front end: run a model on fake tensors, record the run, and build the segments that stages run.

From a model to a capture, when a plan is made, once per kind of batch:

1. `fake_model` runs a copy of the model on fake tensors. `settling` runs it twice and keeps the second record: by then
   the model has filled its caches and installed its hooks.
2. `recorder` records a run; `patches` and `checkpoints` report to it what its torch function mode cannot see.
   `reassignment` and `checks` refuse what a pipeline could not do as one device does.
3. The run leaves a `record`: torch calls, and around them `frames`, the calls of modules.
4. `whole` finds the calls that a step makes as Python; `comparison` rehearses them without the others of the model.
5. `segments` builds functions of parts of the record, and `front_end` the capture.

The segments run in every step. They consist of recorded torch calls and `whole_calls`; `draws` keys their random
numbers, `answers` repeats what they were answered on fake tensors, and `placing` makes DTensors of their inputs.
"""
