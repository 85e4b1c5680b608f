# SPDX-License-Identifier: Apache-2.0
"""Check that what a pipeline assumed when it was built still holds."""
