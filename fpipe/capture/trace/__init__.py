# SPDX-License-Identifier: Apache-2.0
"""The default front end: run the model once on fake tensors, record the run, and play it back stage by stage."""
