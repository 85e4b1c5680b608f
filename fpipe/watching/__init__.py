# SPDX-License-Identifier: Apache-2.0
"""What a pipeline assumed of the world when it was built, and whether that still holds."""
