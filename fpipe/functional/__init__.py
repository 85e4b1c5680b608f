# SPDX-License-Identifier: Apache-2.0
"""Stages, programs and an executor as values that people hold in their hands."""
