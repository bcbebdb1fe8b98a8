"""An update as one compiled graph: what to trace, how to compile it, and when it may stand for the eager one."""
