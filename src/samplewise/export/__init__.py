"""Updates as files that run without Python: `sw.export_update`.

- export: the public function; the sequence of an export
- graph: one update, and a prediction, as functional graphs
- simplify: rewrites for runtimes that run one kernel per operation
- executorch, aotinductor: writers of .pte and .pt2
- runtime: a file, loaded in Python
- verification: the file in a new process, compared with uncompiled updates
"""

from samplewise.export.export import ExportedUpdate, export_update
from samplewise.export.runtime import LoadedUpdate, load_update

__all__ = ["ExportedUpdate", "LoadedUpdate", "export_update", "load_update"]
