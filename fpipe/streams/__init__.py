# SPDX-License-Identifier: Apache-2.0
"""Train on a stream of batches without a flush between them, under schedules that update weights in flight."""
