"""The memory plan: which tensors of a net share memory, proven safe by what happens before what (docs/memory.md)."""

from dagexec.scheduler.memory.arena_memory import ArenaMemory
from dagexec.scheduler.memory.buffers import Buffer, Buffers, Inferred, find_buffers
from dagexec.scheduler.memory.lifetime import Lifetimes, Order, graph_order, list_order
from dagexec.scheduler.memory.pattern import BufferPatterns
from dagexec.scheduler.memory.plan import MemoryPlan

__all__ = [
    "ArenaMemory",
    "Buffer",
    "BufferPatterns",
    "Buffers",
    "Inferred",
    "Lifetimes",
    "MemoryPlan",
    "Order",
    "find_buffers",
    "graph_order",
    "list_order",
]
