# SPDX-License-Identifier: Apache-2.0
"""A cable between two network namespaces: a thread carries its packets, and may delay, lose or stop them."""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time

CREATE, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # TUNSETIFF, and IFF_TUN | IFF_NO_PI, of linux/if_tun.h


class Cable:
    """Two namespaces, `rooms`, whose devices `cable0` and `cable1` are the ends of one cable.

    delay: longest time, in seconds, that a packet is on its way; each takes at least half of it, so packets overtake.
    loss: the share of packets that never arrives.
    pulled: while true, none does. Neither kernel learns of it, as when a switch between two machines is gone.
    """

    def __init__(self, delay: float = 0.0, loss: float = 0.0) -> None:
        self.delay, self.loss, self.pulled = delay, loss, False
        self.rooms = [f"fpipe{os.getpid()}x{end}" for end in range(2)]
        self._ends: list[int] = []
        self._ended = threading.Event()
        self._carrier = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Cable:
        """Raises: OSError where this process may not make namespaces or devices (it needs root and iproute2)."""
        try:
            for end, room in enumerate(self.rooms):
                self._ends.append(_create(f"cable{end}"))
                _ip(f"netns add {room}")
                _ip(f"link set cable{end} netns {room}")
                for words in (f"addr add 10.99.0.{end + 1}/24 dev cable{end}", "link set lo up"):
                    _ip(f"-n {room} {words}")
                _ip(f"-n {room} link set cable{end} up")
        except BaseException:
            self.__exit__()
            raise
        self._carrier.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._carrier.is_alive():
            self._carrier.join()
        for end in self._ends:
            os.close(end)
        for room in self.rooms:
            subprocess.run(["ip", "netns", "del", room], capture_output=True, check=False)

    def _carry(self) -> None:
        drawn, under_way, number = random.Random(0), [], 0
        while not self._ended.is_set():
            patience = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else 0.1
            for end in select.select(self._ends, [], [], min(patience, 0.1))[0]:
                packet, other = os.read(end, 65536), self._ends[end == self._ends[0]]
                if self.pulled or drawn.random() < self.loss:
                    continue
                number += 1  # so that two packets of one moment never compare by their bytes
                arrival = time.monotonic() + self.delay * drawn.uniform(0.5, 1.0)
                heapq.heappush(under_way, (arrival, number, other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(under_way)
                os.write(other, packet)


def _create(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, CREATE, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    return end


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {words}: {done.stderr.strip()}")
