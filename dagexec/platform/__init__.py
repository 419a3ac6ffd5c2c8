"""The process and the machine that dagexec runs in: threads, waits, forks, memory, the processor."""
