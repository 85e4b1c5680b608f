# SPDX-License-Identifier: Apache-2.0
"""The pipeline, the plan of a step, the step, and the agreement of ranks."""
