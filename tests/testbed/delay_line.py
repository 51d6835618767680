"""Copies frames between two network cards, late, slowly or not at all: a slow cable without a kernel module.

Run as `python -I delay_line.py CARD CARD DELAY_S BYTES_PER_S LOSS` (BYTES_PER_S 0: no limit; LOSS 0 to 1);
says `ready` once it copies. The kernel's own netem does this too, but many kernels come without it.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 0x0003
SOL_PACKET = 263
PACKET_VNET_HDR = (
    15  # each frame carries its offload state, so unfinished checksums and large segments survive
)
PACKET_OUTGOING = 4
MAX_FRAME = 10 + 18 + 65536
MAX_BACKLOG_S = 0.5  # what a full queue holds; later frames are dropped, as on a real link
SEED = 1


class Direction:
    """One way of the cable: the frames on it, each with the time at which it leaves."""

    def __init__(
        self, source: socket.socket, target: socket.socket, delay_s: float, bytes_per_s: float, loss: float
    ) -> None:
        self.source, self.target = source, target
        self.delay_s, self.bytes_per_s, self.loss = delay_s, bytes_per_s, loss
        self.queue: deque[tuple[float, bytes]] = deque()
        self.link_free_at = 0.0
        self.random = random.Random(SEED)

    def take(self, now: float) -> None:
        frame, address = self.source.recvfrom(MAX_FRAME)
        if address[2] == PACKET_OUTGOING or self.random.random() < self.loss:
            return
        begins = max(now, self.link_free_at)
        if begins - now > MAX_BACKLOG_S:
            return
        self.link_free_at = begins + (len(frame) / self.bytes_per_s if self.bytes_per_s else 0.0)
        self.queue.append((self.link_free_at + self.delay_s, frame))

    def deliver(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            try:
                self.target.send(self.queue.popleft()[1])
            except OSError as error:  # the card is down, or its queue is full: a cable loses such frames
                print(error, file=sys.stderr)


def open_card(name: str) -> socket.socket:
    card = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    card.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    card.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    card.bind((name, ETH_P_ALL))
    return card


def main(argv: list[str]) -> None:
    first, second = open_card(argv[0]), open_card(argv[1])
    delay_s, bytes_per_s, loss = (float(text) for text in argv[2:])
    ways = {
        first: Direction(first, second, delay_s, bytes_per_s, loss),
        second: Direction(second, first, delay_s, bytes_per_s, loss),
    }
    print("ready", flush=True)
    while True:
        due = [way.queue[0][0] for way in ways.values() if way.queue]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select(list(ways), [], [], timeout_s)
        now = time.monotonic()
        for card in readable:
            ways[card].take(now)
        for way in ways.values():
            way.deliver(now)


if __name__ == "__main__":
    main(sys.argv[1:])
