# SPDX-License-Identifier: Apache-2.0
"""The simulation of the whole system: `python -m tests.simulation --seed N`."""
