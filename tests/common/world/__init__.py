# SPDX-License-Identifier: Apache-2.0
"""A simulated world: processes, their clock, their network and their store, in one process and from one seed.

Every rank is a fiber that runs the script of a user. fpipe's own code for ranks in separate processes runs unchanged;
only what it uses of torch.distributed, of threads and of the clock is replaced. Time passes only when nobody can go on.
"""
