"""Setting of the C library's allocator: memory that one step frees stays in the process for the next step.

Per-sample gradients keep gradients until the norms of all layers are known, and free them together. By default glibc
returns such a block at the end of the heap to the operating system at once, and the next step pays for new pages: 5 to
15 % of its time.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

_NEVER = 2**31 - 1  # bytes at the end of the heap before they are returned to the operating system
_LARGEST = 2**25  # bytes; larger tensors are returned as soon as they are freed. glibc accepts no larger value.


@cache
def keep_freed_memory() -> bool:
    """Keep freed memory of this process, once. False if it is left to the allocator: without glibc, or if the user has
    set the allocator with MALLOC_... or GLIBC_TUNABLES in the environment.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGEST))
