"""How reads into GPU memory use the machine."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20

SWITCH_SECONDS = 2e-4
"""How long a thread of Python may keep the others waiting where threads feed a GPU."""


@dataclass(frozen=True)
class ReadSettings:
    """Sizes and limits of GPU reads; measured best on an H200 with 16 cores.

    A read borrows one of ``readers`` readers of its device. A reader has two slots, each with a
    stream of its own, so that one batch is read while another is decoded. A slot holds the
    stored bytes of a batch, nvCOMP's scratch of about 3.1 times the decoded bytes, and the
    chunks that are not wanted whole: at most 5.1 × ``batch_bytes``. All readers together hold
    at most ``readers`` × 2 × 5.1 × ``batch_bytes`` and never more than ``scratch_share`` of the
    device, because batches are made smaller where they would. The rest of what a read takes is
    its output.

    Parameters
    ----------
    readers
        Reads that run at the same time on one device; more wait for their turn. Counts from
        the first read of a device on.
    batch_chunks, batch_bytes
        Most chunks and decoded bytes of one decoder call.
    scratch_share
        Largest part of a device's memory that the scratch of all readers takes.
    small_request
        Requests of at most this many zstd chunks are decoded on the host and copied once.
        nvCOMP takes as long for one chunk as for a thousand, about 35 times as long as one
        core, whatever the size of the chunk. 0: never.
    decode_seconds
        A batch that is not decoded after this long has a damaged chunk on which nvCOMP never
        ends; the host then finds and names it. Nothing else can run in that process on that
        GPU any more: see `scgpu_tasks.io.scratch.give_up`.
    io_threads
        Threads of KvikIO; None: half of the cores for each GPU, from 4 to 16. The threads that
        submit reads and launch kernels need the others.
    io_task_bytes, io_least_bytes
        Most and least that one of them reads in one go: what a batch needs is shared out
        among all. Bounce buffers are as large as the most.
    """

    readers: int = 6
    batch_chunks: int = 2048
    batch_bytes: int = 512 * _MIB
    scratch_share: float = 0.25
    small_request: int = 16
    decode_seconds: float = 60.0
    io_threads: int | None = None
    io_task_bytes: int = 8 * _MIB
    io_least_bytes: int = 2 * _MIB
